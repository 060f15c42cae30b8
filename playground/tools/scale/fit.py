"""alpha, beta and gamma fitted to measurements, and how far the model is from those that were held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Counts, Machine, Task
from playground.tools.scale import predict
from playground.tools.scale.predict import COSTS
from playground.tools.scale.results import Point, Predictions, Sample, ScaleResult, fit_of

SWEEPS = 2000
"""Enough for three parameters to settle to their last digits, in a fraction of a second."""
REFITS = 10
FITTED_SIZES = [4, 2 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20]
HELD_OUT_SIZES = [256, 8 << 10, 128 << 10, 1 << 20, 8 << 20]
"""Bytes. The sizes held out lie between those fitted on."""


Key = tuple[str, int, int]
"""(algorithm, size of the group, bytes)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured."""

    names: tuple[str, ...]
    """The algorithms."""
    fitted: Mapping[int, Sequence[int]]
    """To fit to: bytes, by size of the group."""
    held_out: Mapping[int, Sequence[int]]
    """Only to predict."""
    seconds: float
    """For how long rounds begin."""


def plan_for(size: int, seconds: float) -> Plan:
    """What to measure in a world of `size`."""
    fitted, held_out = groups(size)
    one_level = tuple(name for name in COSTS if not ALGORITHMS[name].needs_hosts)
    return Plan(
        names=one_level, fitted=dict.fromkeys(fitted, FITTED_SIZES),
        held_out=dict.fromkeys(held_out, HELD_OUT_SIZES), seconds=seconds,
    )  # fmt: skip


def evaluate(samples: Sequence[Sample], plan: Plan, cores: int) -> ScaleResult:
    """The host that the fitted samples describe, how well it predicts the others, and what it predicts."""
    host = fit([sample for sample in samples if sample.size in plan.fitted], cores)
    points = [Point(**vars(sample), error=error(host, sample), fitted=sample.size in plan.fitted) for sample in samples]
    cluster = Machine(host.alpha, host.beta, host.gamma)
    return ScaleResult(
        parameters=host,
        fit=fit_of(points),
        predictions=Predictions(
            host=predict.predictions(host, predict.HOST), cluster=predict.predictions(cluster, predict.CLUSTER)
        ),
    )


def samples_of(by_rank: Sequence[dict[Key, list[float]]]) -> list[Sample]:
    """From every rank's seconds per call, round by round: what the slowest rank took, in the lower quartile of rounds.

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
    counts = [counts_of(sample, cores) for sample in samples]
    seconds = [sample.seconds for sample in samples]
    decisive = [share for share, _ in counts]
    seen = []
    for _ in range(REFITS):
        alpha, beta, gamma = least_squares(decisive, seconds)
        machine = Machine(alpha, beta, gamma, cores)
        seen.append(machine)
        decisive = [max(both, key=machine.seconds_of) for both in counts]
    return min(seen, key=lambda each: sum(error(each, sample) ** 2 for sample in samples))


def counts_of(sample: Sample, cores: int) -> tuple[Counts, Counts]:
    """Each core's share of the total, and the critical path: the longer one decides."""
    cost = COSTS[sample.algorithm](Task(sample.size, sample.nbytes))
    return cost.total.times(1 / cores), cost.between


def error(machine: Machine, sample: Sample) -> float:
    """By how much of what was measured the prediction is too long (or, negative, too short)."""
    return machine.seconds(COSTS[sample.algorithm](Task(sample.size, sample.nbytes))) / sample.seconds - 1


def least_squares(counts: Sequence[Counts], seconds: Sequence[float]) -> list[float]:
    """alpha, beta and gamma, none below 0, that make each count's predicted / measured time as nearly 1 as can be.

    That is, with the smallest sum of squared differences: one parameter after the other is set to its best value beside
    the others, again and again (coordinate descent).
    """
    rows = [
        [part / second for part in (count.messages, count.bytes, count.added)]
        for count, second in zip(counts, seconds, strict=True)
    ]
    products = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    parameters = [0.0, 0.0, 0.0]
    for _ in range(SWEEPS):
        for i in range(3):
            others = sum(products[i][j] * parameters[j] for j in range(3) if j != i)
            parameters[i] = max(0.0, (sums[i] - others) / products[i][i])
    return parameters
