"""The ranks' part of `snapshots measure`: take snapshots, one after the other, and time each."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from playground.runtime import device, report, synchronize
from playground.survival.snapshots import Snapshots, State
from playground.tools.snapshots.page import MeasureSettings, SaveTimes


def measure(rank: int, size: int, settings: MeasureSettings) -> SaveTimes:
    """Take `settings.saves` snapshots of a tensor that changes. All ranks begin each at the same time."""
    tensor = torch.zeros(-(-settings.nbytes // 4), device=device())
    blocked, written = [], []
    with Snapshots(settings.folder, settings.fingerprint, rank=rank, size=size, keep=settings.keep) as snapshots:
        for step in range(1, settings.saves + 1):
            tensor += 1
            state = State(shared={"tensor": tensor}, own={"rng": torch.get_rng_state()})
            dist.barrier()
            synchronize()
            started = time.perf_counter()
            snapshots.save(step, state)
            blocked.append(time.perf_counter() - started)
            snapshots.wait()
            written.append(time.perf_counter() - started)
            report(phase="saving", step=step, steps=settings.saves)
    return SaveTimes(blocked=blocked, written=written, problem=snapshots.problem)
