"""Moments of a training step, and the time between them, on whatever does the work."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device


class Clock:
    """Notes moments. On a GPU, those at which it gets there: the processor, which hands it work, runs ahead of it."""

    def __init__(self) -> None:
        self.on_gpu = device().type == "cuda"

    def start(self) -> Any:
        """A moment at which nothing is under way, neither here nor on another rank."""
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()
        return self.now()

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, *moments: Any) -> list[float]:
        """From each moment to the next."""
        if not self.on_gpu:
            return [after - before for before, after in pairwise(moments)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(moments)]
