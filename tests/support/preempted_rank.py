"""A program: one rank of a world that was joined. When one of them is asked to end all do, or none can."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from playground.runtime import Preempted, preempted, signals
from playground.runtime.launcher.entry import CommandWorld


def store(rank: int, size: int) -> None:
    """Agree, and leave together."""
    print("ready", flush=True)
    asked = torch.zeros(1, dtype=torch.int64)
    while not asked.item():
        time.sleep(0.01)
        asked.fill_(preempted())
        dist.all_reduce(asked, dist.ReduceOp.MAX)
    raise Preempted(3)


def hang(rank: int, size: int) -> None:
    """Wait for a rank that does not come."""
    if rank == 1:
        print("ready", flush=True)
        dist.barrier()
    time.sleep(3600)


if __name__ == "__main__":
    signals.exit_after(0.1)
    signals.handle_termination()
    try:
        fn, grace = {"store": (store, 60.0), "hang": (hang, 0.3)}[sys.argv[1]]
        CommandWorld(None).run(fn, grace=grace)
    except Preempted as preemption:
        print(preemption, file=sys.stderr, flush=True)
        os._exit(preemption.exit_code)
