"""What a measurement results in: samples, how well the model describes them, and predictions for a
machine. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from playground.algorithms.cost_model import Machine, Task
from playground.tools.scale.plan import COSTS, Key, Plan

SIZES = [4 << 2 * step for step in range(15)]
"""Bytes: 4 B to 1 GiB."""
CLUSTER = [2**power for power in range(1, 17)]
"""Ranks: up to 65,536."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A measured time."""

    algorithm: str
    size: int
    """Number of ranks in the group."""
    nbytes: int
    seconds: float
    """Time of a call: what the slowest rank took, in the lower quartile of rounds. (Not in the
    middle one, because all else that a machine does can only add to it.)"""
    node: int
    """Number of these ranks on each host."""
    fitted: bool
    """Whether the model is fitted to it: others it has only to predict."""


@dataclass(frozen=True, kw_only=True)
class Point(Sample):
    """A measured time, and its prediction."""

    error: float
    """Relative error of the prediction: positive if it is too long, negative if too short."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the model describes the samples."""

    points: Sequence[Point]
    median_error: float
    worst_error: float
    """Both of the absolute errors of points that the model was not fitted to."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The times of all algorithms for one tensor on one number of ranks."""

    size: int
    """Bytes of the tensor."""
    world_size: int
    winner: str
    """The fastest algorithm."""
    seconds: dict[str, float]
    """By algorithm."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A machine, and what it is predicted to do."""

    parameters: Machine
    measured: Plan | None = None
    """None if the machine was described; so is `fit`."""
    fit: Fit | None = None
    predictions: Sequence[Prediction]
    """On a cluster of such machines, every rank with cores and a link of its own."""


def samples_of(by_rank: Sequence[Mapping[Key, Sequence[float]]], plan: Plan) -> list[Sample]:
    """From every rank's seconds per call, round by round: a sample for each key."""
    fitted = {
        (len(group.ranks), group.node, nbytes) for group in plan.groups for nbytes in group.fitted
    }
    samples = []
    for key in by_rank[0]:
        slowest = sorted(
            map(max, zip(*(times[key] for times in by_rank if key in times), strict=True))
        )
        name, size, nbytes, node = key
        samples.append(
            Sample(
                algorithm=name,
                size=size,
                nbytes=nbytes,
                seconds=slowest[len(slowest) // 4],
                node=node,
                fitted=(size, node, nbytes) in fitted,
            )
        )
    return samples


def cores_for(sample: Sample, plan: Plan) -> int | None:
    """Cores that the ranks of the sample's group share; None if each rank has a host to itself."""
    if plan.ranks_per_host == 1:
        return None
    hosts = -(-sample.size // sample.node) if plan.hosts > 1 else 1
    return min(hosts * plan.cores, plan.all_cores)


def seconds(machine: Machine, size: int, nbytes: int) -> dict[str, float]:
    """Time of each algorithm on `size` ranks for `nbytes`."""
    task = Task(size, nbytes, machine.ranks_per_node)
    return {name: machine.seconds(cost(task)) for name, cost in COSTS.items()}


def predict(machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """For all `SIZES`, on all these numbers of ranks."""
    rows = []
    for nbytes, size in product(SIZES, ranks):
        times = seconds(machine, size, nbytes)
        winner = min(times, key=times.__getitem__)
        rows.append(Prediction(size=nbytes, world_size=size, winner=winner, seconds=times))
    return rows


def predict_cluster(machine: Machine) -> Result:
    """As `evaluate`, for a cluster that was not measured."""
    return Result(parameters=machine, predictions=predict(machine, CLUSTER))
