"""Moments of a training step, and the time between them, on whatever does the work."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device

Moment = Any
"""Seconds, or an event on a GPU."""


class Clock:
    """Takes the time of named moments. On a GPU, when the GPU gets there: the processor, which hands it work, runs
    ahead of it."""

    def __init__(self) -> None:
        self.on_gpu = device().type == "cuda"
        self.moments: dict[str, Moment] = {}

    def start(self) -> None:
        """Take the moment "start", at which nothing is under way, neither here nor on another rank; forget the others.

        All ranks must call this.
        """
        dist.barrier()
        if self.on_gpu:
            torch.cuda.synchronize()
        self.moments = {"start": self.now()}

    def take(self, moment: str) -> None:
        """Of a moment that comes more than once, the last counts."""
        self.moments[moment] = self.now()

    def now(self) -> Moment:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, *moments: str) -> list[float]:
        """From each of these moments to the next."""
        taken = [self.moments[moment] for moment in moments]
        if not self.on_gpu:
            return [after - before for before, after in pairwise(taken)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(taken)]
