"""Threads that only wait for others of their process keep no deadlock from being proved, and
functional collectives are collectives."""

from __future__ import annotations

import logging.handlers
import multiprocessing
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from torch import nn
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import _pin_memory_loop

from playground import Deadlock
from playground.explain.hang import Kind
from playground.explain.hang.box import find_boxes
from playground.explain.hang.idle import Sleep, find_sleep, waits_for_others

FOREVER = 300.0


def start_pool() -> object:
    pool = ThreadPoolExecutor(2)
    assert [pool.submit(int, "7").result() for _ in range(4)] == [7] * 4
    return pool


def start_listener(records: Any) -> object:
    listener = logging.handlers.QueueListener(records)
    listener.start()
    return listener


def start_feeder() -> object:
    numbers = multiprocessing.get_context("fork").Queue()
    numbers.put(7)
    assert numbers.get() == 7
    return numbers


def start_pinning() -> object:
    """What a DataLoader does with pin_memory=True where there is an accelerator."""
    batches = multiprocessing.get_context("fork").Queue()
    args: Any = batches, queue.Queue(), 0, threading.Event(), "cpu"
    threading.Thread(target=_pin_memory_loop, args=args, daemon=True).start()
    return batches


def start_own_thread() -> object:
    """One of the program's that waits for work."""
    numbers = queue.Queue[int]()
    threading.Thread(target=numbers.get, daemon=True).start()
    return numbers


START: dict[str, Callable[[], object]] = {
    "ThreadPoolExecutor": start_pool,
    "QueueListener": lambda: start_listener(queue.Queue()),
    "QueueListener of a SimpleQueue": lambda: start_listener(queue.SimpleQueue()),
    "multiprocessing.Queue": start_feeder,
    "pin_memory": start_pinning,
    "a thread that gets from a queue": start_own_thread,
}
KEPT: list[object] = []


def test_a_listener_that_only_looks_into_its_queue_does_not_wait() -> None:
    listener = logging.handlers.QueueListener(queue.SimpleQueue())
    with pytest.raises(queue.Empty) as caught:
        listener.dequeue(block=False)
    *_, last = caught.traceback
    assert last.frame.code.raw is type(listener).dequeue.__code__
    assert not waits_for_others(last._rawentry.tb_frame)


def test_a_thread_that_runs_does_not_sleep() -> None:
    """One that has been notified, for one, whose frame is still where it was."""
    done, event, content = threading.Event(), threading.Event(), bytes(2**26)

    def compute() -> None:
        while not done.is_set():
            zlib.crc32(content)  # without the interpreter's lock

    running, waiting = threading.Thread(target=compute), threading.Thread(target=event.wait)
    running.start()
    waiting.start()
    try:
        frame = sys._current_frames()[waiting.ident or 0]
        while not waits_for_others(frame):
            frame = sys._current_frames()[waiting.ident or 0]
        looks: list[Sleep | None] = []
        while None not in looks and len(looks) < 30_000:
            looks.append(find_sleep(running, frame))
            time.sleep(0.001)
        assert None in looks
    finally:
        done.set()
        event.set()


def hang_beside_idle_threads(rank: int, size: int, name: str) -> None:
    KEPT.append(START[name]())
    if rank == 0:
        dist.barrier()


def skip_a_batch(rank: int, size: int) -> None:
    """The loaders of both ranks have workers."""
    loader = DataLoader(range(6), num_workers=1, multiprocessing_context="fork")
    model = DistributedDataParallel(nn.Linear(1, 1))
    for number, batch in enumerate(loader):
        if rank == 0 or number != 3:
            model(batch.float().view(1, 1)).sum().backward()


@pytest.mark.parametrize("name", START)
def test_idle_threads_keep_no_deadlock_from_being_proved(name: str, world: Worlds) -> None:
    with pytest.raises(Deadlock) as caught:
        world(2, timeout=FOREVER).run(hang_beside_idle_threads, name)
    assert (caught.value.diagnosis.kind, caught.value.diagnosis.culprits) == (Kind.ENDED, (1,))


def test_a_skipped_batch_is_proved_beside_workers_of_a_loader(world: Worlds) -> None:
    with pytest.raises(Deadlock) as caught:
        world(2, timeout=FOREVER).run(skip_a_batch)
    found = caught.value.diagnosis
    assert (found.kind, found.culprits, found.operation) == (Kind.ENDED, (1,), "DDP's backward")


@pytest.mark.parametrize("timeout", [None, FOREVER])
def test_only_a_wait_without_an_end_of_its_own_is_idle(timeout: float | None) -> None:
    event, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        event.wait(timeout)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    try:
        found = None
        for _ in range(1000):
            frame = sys._current_frames()[thread.ident or 0]
            found = find_sleep(thread, frame)
            if found or (timeout and frame.f_code is threading.Condition.wait.__code__):
                break
            time.sleep(0.01)
        assert bool(found) == (timeout is None)
    finally:
        event.set()
        thread.join()


def call_functions(rank: int, size: int) -> None:
    """Functional collectives, each in a round, with right results."""
    group: Any = dist.group.WORLD
    collectives, ones = _functional_collectives, torch.ones(2)
    for _ in range(2):
        assert collectives.all_reduce(ones, "sum", group).tolist() == [size] * 2
        row = torch.full((1, 1), float(rank))
        for dim in (0, 1):
            gathered = collectives.all_gather_single(row, dim, group)
            assert gathered.flatten().tolist() == list(range(size))
        assert collectives.reduce_scatter_single(ones, "sum", 0, group).tolist() == [size]
        assert collectives.broadcast(row, 1, group).tolist() == [[1]]
        assert collectives.all_to_all_single(row.expand(size, 1).contiguous(), None, None, group)[
            :, 0
        ].tolist() == list(range(size))
        sums = collectives.all_reduce_coalesced([ones, ones], "sum", group)
        assert [each.tolist() for each in sums] == [[size] * 2] * 2
        dist.all_reduce(torch.ones(2))
    (view,) = find_boxes([os.getpid()])
    state = view.read()
    assert state.unnamed == ""
    names = [each.name for each in state.operations][-8:]
    assert names == [
        "all_reduce", "all_gather_into_tensor", "all_gather_into_tensor", "reduce_scatter_tensor",
        "broadcast", "all_to_all_single", "all_reduce_coalesced", "all_reduce",
    ]  # fmt: skip
    assert all("test_idle_threads.py" in each.line for each in state.operations)
    if rank == 0:
        collectives.all_reduce(ones, "sum", group) + 1


def sum_compiled(rank: int, size: int) -> list[float]:
    """torch.compile turns `dist.all_reduce` into a functional collective."""
    group: Any = dist.group.WORLD
    assert _functional_collectives.all_reduce(torch.ones(2), "sum", group).tolist() == [size] * 2

    def double_sum(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled

    compiled = torch.compile(double_sum, backend="eager", fullgraph=True)
    return [each.item() for each in compiled(torch.full((2,), rank + 1.0))]


def test_functional_collectives_are_compiled(world: Worlds) -> None:
    assert world(2).run(sum_compiled) == [[6.0, 6.0]] * 2


def full_tensor_on_one_rank(rank: int, size: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3]
    if rank == 0:
        tensor.full_tensor()


def full_state_on_one_rank(rank: int, size: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (size,)))
    model(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(
    ("fn", "caller", "operation"),
    [
        (call_functions, "", "all_reduce"),
        (full_tensor_on_one_rank, "full_tensor's ", "all_gather_into_tensor"),
        (full_state_on_one_rank, "get_model_state_dict's ", "all_gather_into_tensor"),
    ],
)
def test_functional_collectives_are_named_as_what_ranks_wait_in(
    fn: Callable[[int, int], None], caller: str, operation: str, world: Worlds
) -> None:
    with pytest.raises(Deadlock) as caught:
        world(2, timeout=FOREVER).run(fn)
    found = caught.value.diagnosis
    assert (found.kind, found.culprits, found.operation) == (Kind.ENDED, (1,), operation)
    assert f"rank 0 is in {caller}{operation} (:" in " ".join(found.sentence.split())
