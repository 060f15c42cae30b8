"""Trials: each call is warmed up, then timed in turns with the others, so many in a row that the clock can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from playground.measurement.interleave import Heartbeat, interleave, slowest, timed

TRIAL = 0.006
"""Seconds a trial is to take."""
MAX_CALLS = 200
"""In one trial."""
SAMPLE = 3
"""Calls from which the number of calls per trial is worked out."""

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Trials:
    calls: int
    """In a row, per trial."""
    times_us: list[float]
    """Per call, in µs, by trial, each on its slowest rank."""


def run_trials(candidates: Sequence[Call], iterations: int, warmup: int, order: Random) -> list[Trials]:
    """`iterations` trials of each candidate. All ranks must call this, with `order` in the same state."""
    warm_up(candidates, warmup)
    seconds_per_call = slowest([timed(call, times=SAMPLE)() for call in candidates])
    calls = [max(1, min(MAX_CALLS, round(TRIAL / seconds))) for seconds in seconds_per_call]
    trials = [timed(call, times=times) for call, times in zip(candidates, calls, strict=True)]
    outcomes = interleave(trials, range(iterations), order)
    return [
        Trials(calls=times, times_us=[1e6 * seconds for seconds in slowest(outcome)])
        for times, outcome in zip(calls, outcomes, strict=True)
    ]


def warm_up(candidates: Sequence[Call], calls: int) -> None:
    heartbeat = Heartbeat()
    for candidate in candidates:
        for _ in range(calls):
            heartbeat.beat()
            candidate()
