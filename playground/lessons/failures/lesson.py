"""Five programs. Some stand still, some return wrong values, and no rank says why.

    torchrun --nproc-per-node 4 lesson.py            # one after the other
    torchrun --nproc-per-node 4 lesson.py average    # one of them
    TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc-per-node 4 lesson.py fit

Each rank prints what torch says of it, and what torch's flight recorder has of its calls. Beside
that, what the playground says of each, and the values on all ranks:

    python -m playground failures
    python -m playground failures --only gossip -n 5
"""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=2)
"""The longest that a call waits for other ranks, so that a program that stands still ends."""


def fit(rank: int, size: int) -> float:
    """Train a weight on one sample a rank, until the loss is small."""
    weight, sample = torch.zeros(1), torch.tensor([1 + rank / size])
    for _ in range(100):
        error = weight - sample
        if error.square() < 0.1:
            break
        dist.all_reduce(error)
        weight -= 0.1 * error / size
    return round(weight.item(), 4)


def gossip(rank: int, size: int, limit: timedelta | None = LIMIT) -> float:
    """Average a number with the right neighbour, then with the left one."""
    pairs = [dist.new_group([left, (left + 1) % size], timeout=limit) for left in range(size)]
    number = torch.tensor([rank + 1.0])
    for pair in (pairs[rank], pairs[rank - 1]):
        dist.all_reduce(number, group=pair)
        number /= 2
    return number.item()


def count(rank: int, size: int) -> list[float]:
    """Add up the tables of all ranks, of two rows and three columns; return the sums of columns."""
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    if rank == 1:
        table = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])  # as its file has it
    dist.all_reduce(table)
    return table.sum(dim=table.shape.index(2)).tolist()


def average(rank: int, size: int) -> dict[str, float]:
    """Average the gradients of two parameters."""
    gradients = {"weight": torch.tensor([rank + 1.0]), "bias": torch.tensor([10.0 * rank])}
    if rank == 0:
        gradients = dict(sorted(gradients.items()))  # it has read them from a file
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return {name: gradients[name].item() / size for name in ("weight", "bias")}


def save(rank: int, size: int) -> int:
    """Rank 0 writes the model, in 30 pieces, and then all continue."""
    written = 0
    while rank == 0 and written < 30:
        time.sleep(0.1)
        written += 1
    dist.barrier()
    return written


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (fit, gossip, count, average, save)
}


def recorded_calls() -> list[str]:
    """The latest calls of this rank, as torch's flight recorder has them: operation, number in the
    group, group, and line. No public function returns them."""
    dump = torch._C._distributed_c10d._dump_fr_trace
    calls = []
    for entry in pickle.loads(dump(True, True, False)).get("entries", []):
        operation = entry["profiling_name"].removeprefix("gloo:")
        lines = [frame["line"] for frame in entry["frames"] if frame["name"] in PROGRAMS]
        where = f"group {entry['process_group'][0]}, line {lines[0] if lines else '?'}"
        calls.append(f"{operation} #{entry['collective_seq_id']} of {where}")
    return calls


def describe(calls: list[str]) -> str:
    number = f"{len(calls)} call{'s' * (len(calls) > 1)}"
    return f"{number}, the last {calls[-1]}" if calls else "no call"


def shorten(error: RuntimeError) -> str:
    """The first line of what torch raised, without the lines of C++ and the options of tensors."""
    text = re.sub(r", TensorDeviceTypes=TensorOptions\(.*?\)\)\)", ")", str(error))
    return re.sub(r"\[/\S+\] ", "", text).splitlines()[0]


def meet(store: dist.Store, rank: int, size: int, where: str) -> None:
    """Wait for all ranks, however long they take: without a process group, which would give up."""
    store.set(f"{where}: {rank}", "is here")
    store.wait([f"{where}: {other}" for other in range(size)])


def run_alone(rank: int, size: int, name: str, store: dist.Store) -> str:
    """Run a program in a group of its own. Returns what it has returned, or torch has raised."""
    meet(store, rank, size, f"before {name}")
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=LIMIT
    )
    try:
        said = f"returned {PROGRAMS[name](rank, size)}"
    except RuntimeError as error:
        said = shorten(error)
    meet(store, rank, size, f"after {name}")
    dist.destroy_process_group()
    return said


if __name__ == "__main__":
    store, rank, size = next(dist.rendezvous("env://"))
    for name in sys.argv[1:] or PROGRAMS:
        earlier, said = len(recorded_calls()), run_alone(rank, size, name, store)
        calls = describe(recorded_calls()[earlier:])
        print(f"Rank {rank}, {name}: {said}\nRank {rank}, {name}, recorder: {calls}", flush=True)
