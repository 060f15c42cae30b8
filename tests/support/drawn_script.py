"""A right script: `drawn_script.py SEED ROUNDS PORT FOLDER` runs programs drawn from the seed, in
surroundings that are drawn, too.

What may be drawn: variables that torch reads when it meets others, the way in which ranks meet,
DataLoader workers, a pool, threads that poll or send, signals, a process that is stopped for a
while, and a collective among the exit functions. All ranks draw the same.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SEED, ROUNDS, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
drawn = random.Random(SEED)
own = random.Random(SEED * SIZE + RANK)
VARIABLES = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO",
}  # fmt: skip
CHOSEN = {name: VARIABLES[name] for name in drawn.sample([*VARIABLES], drawn.randint(0, 3))}
os.environ.update(CHOSEN)

# what torch reads at its import has been set
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from drawn_player import Player, stop_for_a_while, write_rounds  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


def meet_where_the_environment_says() -> None:
    dist.init_process_group("gloo")


def meet_at_a_port_of_its_own() -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=PORT)
    dist.init_process_group("gloo")


def meet_at_an_address() -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=SIZE
    )


def meet_in_a_file() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/met", rank=RANK, world_size=SIZE)


def meet_at_a_store_of_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", int(PORT), SIZE, is_master=RANK == 0)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)


WAYS = (
    meet_where_the_environment_says, meet_at_a_port_of_its_own, meet_at_an_address, meet_in_a_file,
    meet_at_a_store_of_its_own,
)  # fmt: skip


@contextlib.contextmanager
def nothing(group: Any) -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextlib.contextmanager
def loader_workers(group: Any) -> Iterator[Callable[[], object]]:
    data = TensorDataset(torch.arange(64.0))
    loader = DataLoader(data, 8, num_workers=own.randint(1, 2), persistent_workers=True)
    batches = iter(loader)

    def fetch() -> None:
        nonlocal batches
        if (batch := next(batches, None)) is None:
            batches = iter(loader)
            batch = next(batches)
        assert batch[0].numel() == 8

    yield fetch


@contextlib.contextmanager
def pool(group: Any) -> Iterator[Callable[[], object]]:
    with multiprocessing.get_context("fork").Pool(2) as workers:
        yield lambda: workers.map(abs, range(-4, 0))


@contextlib.contextmanager
def polling_thread(group: Any) -> Iterator[Callable[[], object]]:
    done = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(lambda: done.wait(0.01), True)])
    thread.start()
    yield lambda: None
    done.set()
    thread.join()


@contextlib.contextmanager
def sending_thread(group: Any) -> Iterator[Callable[[], object]]:
    """One that sums in a group of its own what it takes from a queue; nobody waits for it but at
    the end."""
    tasks: queue.Queue[float | None] = queue.Queue()

    def work() -> None:
        for value in iter(tasks.get, None):
            total = torch.tensor([value])
            dist.all_reduce(total, group=group)
            assert total == value * SIZE

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda: tasks.put(1.0)
    tasks.put(None)
    thread.join()


@contextlib.contextmanager
def signals(group: Any) -> Iterator[Callable[[], object]]:
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    yield lambda: None
    signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def stopped_for_a_while(group: Any) -> Iterator[Callable[[], object]]:
    child = stop_for_a_while(own) if RANK == SEED % SIZE else None
    yield lambda: None
    if child:
        child.wait()


SURROUNDINGS = (
    nothing, loader_workers, pool, polling_thread, sending_thread, signals, stopped_for_a_while,
)  # fmt: skip


def leave_together() -> None:
    """An exit function that communicates, late on one rank."""
    time.sleep(0.3 * (RANK == 0))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == SIZE
    dist.destroy_process_group()


def main() -> None:
    way = drawn.choice(WAYS)
    around = drawn.sample(SURROUNDINGS, drawn.randint(1, 2))
    way()
    groups = [dist.new_group() for _ in around]
    ends_late = drawn.random() < 0.5
    if ends_late:
        atexit.register(leave_together)
    player = Player(SIZE, own, disturbed=True)
    with contextlib.ExitStack() as stack:
        entered = zip(around, groups, strict=True)
        acts = [stack.enter_context(each(group)) for each, group in entered]
        for number, programs in enumerate(write_rounds(SIZE, ROUNDS, drawn)):
            for act in acts:
                act()
            player.run(number, programs[RANK])
    if not ends_late:
        dist.barrier()
        dist.destroy_process_group()
    if RANK == 0:
        names = ", ".join([way.__name__, *(each.__name__ for each in around), *CHOSEN])
        print(f"{player.called} calls: {names}")


if __name__ == "__main__":
    main()
