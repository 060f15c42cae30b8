"""On nccl calls return at once: what counts is the time of the GPU, from events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import COLD, hold_the_gpu

from playground.explain.cost.log import read_ranks
from playground.explain.cost.profile import Profile
from playground.testing import World
from playground.world import device

pytestmark = pytest.mark.gpu


def meet_late(rank: int, size: int, folder: Path) -> float:
    """Rank 1's GPU comes late to a call that blocks, and early to one that does not. Returns how
    long it was held."""
    from playground.explain.cost.meter import metered

    held = 0.0
    dist.all_reduce(torch.ones(4, device=device()))  # NCCL connects
    with metered(folder, rank, None):
        if rank == 1:
            held = hold_the_gpu()
        dist.all_reduce(torch.ones(4, device=device()))
        work: Any = dist.all_reduce(torch.ones(8, device=device()), async_op=True)
        hold_the_gpu()
        work.wait()
    return held


def test_the_time_is_that_of_the_gpu(world: Callable[..., World], tmp_path: Path) -> None:
    _, held = world(2, backend="nccl", timeout=COLD).run(meet_late, tmp_path)
    profile = Profile((), "nccl", read_ranks(tmp_path, 2, time.monotonic()))
    blocking, issued, wait = sorted(profile.rows, key=lambda row: row.place.line)
    assert wait.place.operation == "all_reduce.wait"
    assert (blocking.total.calls, issued.total.calls, wait.total.calls) == (2, 2, 0)
    assert (blocking.ranks[0].sent, issued.ranks[0].sent) == (4 * 4, 8 * 4)
    assert blocking.ranks[0].waited >= held / 2
    assert issued.total.waited == 0
    assert issued.total.hidden > 0
