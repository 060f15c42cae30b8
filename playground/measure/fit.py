"""alpha, beta and gamma from what was measured, and how far the model is from what it was not shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.measure.costs import COSTS
from playground.measure.model import Machine, Task, Work

SWEEPS = 2000
"""Enough for three parameters to settle to their last digits, in a fraction of a second."""
REFITS = 10
FITTED_SIZES = [4, 2 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20]
HELD_OUT_SIZES = [256, 8 << 10, 128 << 10, 1 << 20, 8 << 20]
"""Bytes. The sizes held out lie between those fitted on."""


@dataclass(frozen=True)
class Sample:
    """What one algorithm took for `nbytes` in a group of `size`."""

    algorithm: str
    size: int
    nbytes: int
    seconds: float


Key = tuple[str, int, int]
"""(algorithm, size of the group, bytes)."""


def samples_of(by_rank: Sequence[dict[Key, list[float]]]) -> list[Sample]:
    """From every rank's seconds a call, round by round: what the slowest rank took, in the lower quartile of rounds.

    Not in the middle one, because all else that a machine does can only add to it.
    """
    samples = []
    for key in by_rank[0]:
        slowest = sorted(map(max, zip(*(times[key] for times in by_rank if key in times), strict=True)))
        samples.append(Sample(*key, slowest[len(slowest) // 4]))
    return samples


def groups(size: int) -> tuple[list[int], list[int]]:
    """In a world of `size`: the sizes of the groups to fit on, and of those only to predict."""
    fitted = {2, size // 2}
    return sorted(fitted), sorted({3, size} - fitted)


def fit(samples: Sequence[Sample], cores: int) -> Machine:
    """The host with `cores` whose predictions have the smallest squared relative errors.

    Whether its path or its share of the total decides over an all-reduce depends on what is to be found. So: take the
    shares first, fit, look again which decides, fit again; of all machines on the way, the best.
    """
    works = [works_of(sample, cores) for sample in samples]
    seconds = [sample.seconds for sample in samples]
    decisive = [share for share, _ in works]
    seen = []
    for _ in range(REFITS):
        alpha, beta, gamma = least_squares(decisive, seconds)
        machine = Machine(alpha, beta, gamma, cores)
        seen.append(machine)
        decisive = [max(both, key=machine.seconds_of) for both in works]
    return min(seen, key=lambda each: sum(error(each, sample) ** 2 for sample in samples))


def works_of(sample: Sample, cores: int) -> tuple[Work, Work]:
    """Each core's share of the total, and the critical path: the longer one decides."""
    cost = COSTS[sample.algorithm](Task(sample.size, sample.nbytes))
    return cost.total.times(1 / cores), cost.between


def error(machine: Machine, sample: Sample) -> float:
    """By how much of what was measured the prediction is too long (or, negative, too short)."""
    return machine.seconds(COSTS[sample.algorithm](Task(sample.size, sample.nbytes))) / sample.seconds - 1


def least_squares(works: Sequence[Work], seconds: Sequence[float]) -> list[float]:
    """The three prices, none below 0, that make each work / seconds as nearly 1 as can be, by their squares.

    One price after the other is set to its best value beside the others, again and again.
    """
    rows = [
        [part / second for part in (work.messages, work.bytes, work.added)]
        for work, second in zip(works, seconds, strict=True)
    ]
    products = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    prices = [0.0, 0.0, 0.0]
    for _ in range(SWEEPS):
        for i in range(3):
            others = sum(products[i][j] * prices[j] for j in range(3) if j != i)
            prices[i] = max(0.0, (sums[i] - others) / products[i][i])
    return prices
