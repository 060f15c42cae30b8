"""Interleaved timing: in every round each call has one turn, in random order.

So other load on the machine affects all calls alike, and their ratio is not biased.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from playground.explain.hang.hooks import hooks
from playground.world import device, report, synchronize

REPORT_EVERY = 1.0
"""Seconds between two reports, which take time from a core."""

Outcome = TypeVar("Outcome")


def interleave(
    calls: Sequence[Callable[[], Outcome]], rounds: Iterable[object], order: Random
) -> list[list[Outcome]]:
    """Call each of `calls` once in every round. Returns their results: [call][round]. `order` must
    be in the same state on every rank, and `rounds` must yield equally often there."""
    outcomes: list[list[Outcome]] = [[] for _ in calls]
    heartbeat = Heartbeat()
    for _ in rounds:
        for number in order.sample(range(len(calls)), len(calls)):
            heartbeat.beat()
            outcomes[number].append(calls[number]())
    return outcomes


def timed(
    call: Callable[[], object],
    times: int = 1,
    group: Any = None,
) -> Callable[[], float]:
    """A function that returns the seconds of one of `times` calls in a row on this rank, all ranks
    starting together.

    A single call may be shorter than the overhead of timing it. The work of this rank's GPU is
    included.
    """

    def seconds() -> float:
        dist.barrier(group)
        synchronize()
        with hooks.paused():
            started = time.perf_counter()
            for _ in range(times):
                call()
            synchronize()
            return (time.perf_counter() - started) / times

    return seconds


def slowest(seconds: Sequence[float], group: Any = None) -> list[float]:
    """The maximum of each figure over all ranks of the group. All of them must call this."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return list(largest.tolist())


class Heartbeat:
    """Reports from time to time that this rank makes progress."""

    def __init__(self) -> None:
        self.reported = time.monotonic()

    def beat(self, **progress: object) -> None:
        """Report `progress`, if the last report is older than `REPORT_EVERY`."""
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.reported = time.monotonic()
            report(**(progress or {"measuring": True}))


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` of the values lie, interpolated linearly."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
