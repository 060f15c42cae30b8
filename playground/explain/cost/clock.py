"""Moments of the host, and of a GPU, which is behind it: what depends on a GPU's is computed when
the GPU has come there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Moment = Any
"""Seconds of the host's monotonic clock; on a GPU, an event."""


class Later(NamedTuple):
    """What is computed when a GPU has come to an event."""

    last: Moment
    compute: Callable[[], None]


class Clock:
    """Takes moments, and computes what depends on them."""

    def __init__(self) -> None:
        self.later: deque[Later] = deque()
        """What can be computed once the GPU has come to an event."""
        self.base: Moment = None
        """The event from which the moments of a GPU are counted."""

    def now(self, on_gpu: bool = False) -> Moment:
        if not on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        if self.base is None:
            self.base = torch.cuda.Event(enable_timing=True)
            self.base.record()
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """A moment as a number; of a GPU, once it has come to the event."""
        if isinstance(moment, float):
            return moment
        found: float = self.base.elapsed_time(moment) / 1000
        return found

    def settle(self, last: Moment, compute: Callable[[], None]) -> None:
        """Compute what depends on moments up to `last`: now or, on a GPU, when it has come
        there."""
        if isinstance(last, float):
            compute()
            return
        self.later.append(Later(last, compute))
        while self.later and self.later[0].last.query():
            self.later.popleft().compute()

    def settle_all(self) -> None:
        """Compute all that is left, when the GPU has done what it was given."""
        if self.later:
            torch.cuda.synchronize()
            while self.later:
                self.later.popleft().compute()
