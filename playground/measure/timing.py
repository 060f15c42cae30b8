"""Timing side by side: in every round each contestant has one trial, in an order that changes.

So whatever else the machine does meets all of them, and their ratio survives. A trial is many calls, for one is
shorter than what comes between the clock and it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device, report

TRIAL = 0.006
"""Seconds a trial is to take."""
MOST_CALLS = 200
"""In one trial."""
SAMPLE = 3
"""Calls from which the number of calls in a trial is worked out."""
TELL_EVERY = 1.0
"""Seconds between two signs of life: whoever hears them takes time from a core."""


@dataclass
class Contestant:
    call: Callable[[], object]
    calls: int = 1
    """In one trial."""
    times: list[float] = field(default_factory=list)
    """Of one call, in µs: by trial, each on its slowest rank."""

    def trial(self) -> float:
        """Seconds for one call on this rank."""
        dist.barrier()
        synchronise()
        started = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        synchronise()
        return (time.perf_counter() - started) / self.calls


def synchronise() -> None:
    """Wait until the GPU has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: Sequence[float], group: Any = None) -> list[float]:
    """Each figure's largest among all ranks of the group."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return list(largest.tolist())


class Pulse:
    """Tells whoever listens, now and then, that this rank is alive."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def beat(self) -> None:
        if time.monotonic() - self.told > TELL_EVERY:
            self.told = time.monotonic()
            report(racing=True)


def race(contestants: Sequence[Contestant], iterations: int, warmup: int, order: random.Random) -> None:
    """Warm up, and give each `iterations` trials. `order` must be in the same state on every rank."""
    pulse = Pulse()
    for contestant in contestants:
        for _ in range(warmup):
            pulse.beat()
            contestant.call()
        contestant.calls = SAMPLE
    for contestant, seconds in zip(contestants, slowest([each.trial() for each in contestants]), strict=True):
        contestant.calls = max(1, min(MOST_CALLS, round(TRIAL / seconds)))
    seconds_here: list[list[float]] = [[] for _ in contestants]
    for _ in range(iterations):
        for number in order.sample(range(len(contestants)), len(contestants)):
            pulse.beat()
            seconds_here[number].append(contestants[number].trial())
    for contestant, times in zip(contestants, seconds_here, strict=True):
        contestant.times = [1e6 * seconds for seconds in slowest(times)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of them lie, on the line between the two nearest."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
