"""A rank of a world that was joined, by hand or by torchrun: `python -m joined_rank HOW [CULPRIT]`.

One rank goes wrong, or (`store`, `wait`) one is asked to end: then all do, or none can. Or (`tidy`)
a rank that has lost another has something left to do."""

from __future__ import annotations

import sys
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from ranks import misbehave

from playground.app import leave
from playground.base import signals
from playground.base.errors import PlaygroundError
from playground.world import Preempted, preempted
from playground.world.command_world import CommandWorld


def go_wrong(rank: int, size: int, how: str, culprit: str) -> None:
    """Every rank waits for the others; the culprit says a word and does something else."""
    dist.barrier()
    if rank == int(culprit):
        print("now", flush=True)
        misbehave(how)
    dist.barrier()


def tidy(rank: int, size: int, how: str) -> None:
    if rank == 1:
        misbehave("kill")
    try:
        dist.barrier()
    finally:
        time.sleep(0.2)
        print("tidy", flush=True)


def store(rank: int, size: int, how: str) -> None:
    """Agree, and leave together."""
    print("ready", flush=True)
    asked = torch.zeros(1, dtype=torch.int64)
    while not asked.item():
        time.sleep(0.01)
        asked.fill_(preempted())
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    raise Preempted(3)


def wait(rank: int, size: int, how: str) -> None:
    """Wait for a rank that does not come."""
    if rank == 1:
        print("ready", flush=True)
        dist.barrier()
    time.sleep(3600)


def cross(rank: int, size: int, how: str) -> None:
    """The ranks call different collectives."""
    (dist.barrier if rank else lambda: dist.all_reduce(torch.ones(1)))()


def main() -> NoReturn:
    ways: dict[str, Any] = {
        "store": (store, 60.0, 0.1), "wait": (wait, 0.3, 0.1), "cross": (cross, None, 0.3),
        "tidy": (tidy, None, 0.3),
    }  # fmt: skip
    fn, grace, limit = ways.get(sys.argv[1], (go_wrong, None, 0.3))
    signals.exit_after(limit)
    signals.handle_termination()
    try:
        CommandWorld(None).run(fn, *sys.argv[1:], grace=grace)
    except PlaygroundError as error:
        leave(error.exit_code, str(error))
    leave(0)


if __name__ == "__main__":
    main()
