"""Trials: each call is timed in turns with the others, so many in a row that the clock can tell.

The trials of one size are taken in several passes over all sizes, and not all at once. What else a machine does comes
and goes within seconds: taken at once, all trials of a size would meet the same moment, lie close together, and yet lie
elsewhere in the next run. Spread over the run, they lie as far apart as two runs do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

from playground.measurement.interleave import Heartbeat, gather_by_rank, interleave, slowest, timed

PASSES = 4
TRIAL = 0.006
"""Seconds a trial is to take."""
MAX_CALLS = 200
"""In one trial."""
SAMPLE = 3
"""Calls from which the number of calls per trial is worked out."""

Call = Callable[[], object]


class Trials:
    """All trials of one call, pass by pass, the same on every rank."""

    def __init__(self, calls: int, ranks: int) -> None:
        self.calls = calls
        """In a row, per trial."""
        self.times_us: list[list[float]] = [[] for _ in range(ranks)]
        """Per call, in µs: [rank][trial]."""

    def add(self, seconds: list[float]) -> None:
        """Take in the seconds per call that further trials took on this rank. All ranks must call this."""
        for times_us, theirs in zip(self.times_us, gather_by_rank(seconds), strict=True):
            times_us += [1e6 * each for each in theirs]

    @property
    def slowest_us(self) -> list[float]:
        """By trial, on its slowest rank."""
        return [max(times) for times in zip(*self.times_us, strict=True)]

    @property
    def rank_us(self) -> list[float]:
        """By rank, the median of its trials."""
        return [median(times) for times in self.times_us]

    @property
    def slowest_rank(self) -> tuple[int, float]:
        """The rank that was the slowest in most trials, and in what fraction of them."""
        by_trial = list(zip(*self.times_us, strict=True))
        [(rank, trials)] = Counter(times.index(max(times)) for times in by_trial).most_common(1)
        return rank, trials / len(by_trial)


def split_into_passes(iterations: int) -> list[int]:
    """How many trials each pass takes: as equal as can be, none empty."""
    passes = min(PASSES, iterations)
    return [iterations // passes + (number < iterations % passes) for number in range(passes)]


def prepare_trials(candidates: Sequence[Call], warmup: int, ranks: int) -> list[Trials]:
    """Warm up, and find how many calls of each candidate fill a trial. All ranks must call this."""
    warm_up(candidates, warmup)
    seconds_per_call = slowest([timed(call, times=SAMPLE)() for call in candidates])
    return [Trials(max(1, min(MAX_CALLS, round(TRIAL / seconds))), ranks) for seconds in seconds_per_call]


def run_trials(candidates: Sequence[Call], trials: Sequence[Trials], iterations: int, order: Random) -> None:
    """Add `iterations` trials of each candidate to its trials. All ranks must call this, with `order` in the same
    state."""
    timers = [timed(call, times=each.calls) for call, each in zip(candidates, trials, strict=True)]
    for each, seconds in zip(trials, interleave(timers, range(iterations), order), strict=True):
        each.add(seconds)


def warm_up(candidates: Sequence[Call], calls: int) -> None:
    heartbeat = Heartbeat()
    for candidate in candidates:
        for _ in range(calls):
            heartbeat.beat()
            candidate()
