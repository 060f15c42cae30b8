"""torch.distributed.checkpoint beside the board."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from playground.lessons.checkpoint.lesson import cut, load, save, shared_folder


def beside_torch(rank: int, size: int) -> dict[str, object]:
    """Save 32 MiB that all ranks hold, by hand and by torch.distributed.checkpoint: the seconds
    that training stands still on the slowest rank.

    `async_save` copies the state, then a thread writes the copy. The thread calls collectives, too,
    so it has a group of its own.
    """
    torch.manual_seed(1234)  # the same on all ranks
    state = {f"layer{index}": torch.randn(1024, 1024) for index in range(8)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    group = dist.new_group(backend="gloo")
    seconds: dict[str, float] = {}
    with shared_folder() as folder:
        ways = {way: folder / way for way in ("by_hand", "dcp", "async_dcp")}
        with timed(seconds, "by_hand"):
            save(ways["by_hand"], {name: cut(tensor) for name, tensor in state.items()})
        with timed(seconds, "dcp"):
            dcp.save(state, checkpoint_id=ways["dcp"], process_group=group)
        with timed(seconds, "async_dcp"):
            written = dcp.async_save(state, checkpoint_id=ways["async_dcp"], process_group=group)
        for tensor in state.values():
            tensor.zero_()  # training may change the state while the thread writes
        written.result()
        equal = {}
        for way, place in ways.items():
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            if way == "by_hand":
                load(place, {name: cut(tensor) for name, tensor in found.items()})
            else:
                dcp.load(found, checkpoint_id=place, process_group=group)
            equal[way] = all(torch.equal(found[name], expected[name]) for name in expected)
        sizes = {way: [file.stat().st_size for file in at.iterdir()] for way, at in ways.items()}
    return {
        "seconds": seconds,
        "files": {way: len(each) for way, each in sizes.items()},
        "mib": {way: round(sum(each) / 2**20, 1) for way, each in sizes.items()},
        "equal_bits": equal,
    }


@contextmanager
def timed(seconds: dict[str, float], way: str) -> Iterator[None]:
    dist.barrier()
    begin = time.perf_counter()
    yield
    slowest = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds[way] = round(slowest.item(), 3)
