"""Ranks on gloo that are made to behave as those of another backend do."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.runtime import device, report
from playground.runtime.backends import BACKENDS


def our_all_reduce_as_on_nccl(rank: int, size: int, numel: int) -> dict[str, list[bool]]:
    """Messages in batches, and no second thread: for each algorithm, whether it was right, synchronous and not."""
    BACKENDS["gloo"].batches_messages, BACKENDS["gloo"].allows_threads = True, False
    right: dict[str, list[bool]] = {}
    for name in ALGORITHMS:
        all_reduce = load_all_reduce(name)
        mine = torch.arange(numel, dtype=torch.int64) * (rank + 1)
        expected = torch.arange(numel) * sum(range(size + 1))
        ours, beside = mine.clone(), mine.clone()
        all_reduce(ours)
        work: Any = all_reduce(beside, async_op=True)
        done = work.is_completed()  # nothing is left to a thread
        work.wait()
        right[name] = [torch.equal(ours, expected), torch.equal(beside, expected), done]
    return right


def leave_hand_in_hand(rank: int, size: int) -> int:
    """As nccl's communicators do: none is destroyed before all the others are being destroyed too."""
    BACKENDS["gloo"].drain = dist.barrier  # type: ignore[method-assign]
    return rank


def ask_the_store_when_rank_0_has_left(rank: int, size: int) -> int:
    """As nccl's threads do: a rank that is slow to leave still asks the store, which rank 0 serves."""
    store = dist.distributed_c10d._get_default_store()

    def drain() -> None:
        if rank > 0:
            time.sleep(0.5)
            store.set(f"asked by {rank}", "")
            assert store.check([f"asked by {rank}"])

    BACKENDS["gloo"].drain = drain  # type: ignore[method-assign]
    return rank


def fail_to_leave(rank: int, size: int, culprit: int) -> int:
    def drain() -> None:
        if rank == culprit:
            raise SystemExit(9)

    BACKENDS["gloo"].drain = drain  # type: ignore[method-assign]
    return rank


def wait_for_one_who_is_busy(rank: int, size: int) -> None:
    """Rank 0 waits in an operation, for two seconds at most, while rank 1 is busy with something else."""
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        for _ in range(240):
            time.sleep(0.5)
            report(still="busy")
    tensor = torch.ones(1, device=device())
    dist.all_reduce(tensor, group=group)
    tensor.item()


def uses_cuda(rank: int, size: int) -> bool:
    """Whether a rank on gloo, having worked, has touched a GPU."""
    tensor = torch.ones(1000)
    for name in ALGORITHMS:
        load_all_reduce(name)(tensor)
    dist.all_reduce(tensor)
    return torch.cuda.is_initialized()
