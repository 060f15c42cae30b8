"""Every algorithm's time for any number of ranks and bytes, and which of them is the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from playground.algorithms.cost_model import Machine, Task
from playground.tools.scale.plan import COSTS
from playground.tools.scale.results import Prediction, Predictions, ScaleResult

SIZES = [4 << 2 * step for step in range(15)]
"""Bytes: 4 B to 1 GiB."""
HOST = [2**power for power in range(1, 8)]
CLUSTER = [2**power for power in range(1, 17)]
"""Ranks: as many as one host takes, and up to 65,536."""


def seconds(machine: Machine, size: int, nbytes: int) -> dict[str, float]:
    """What each algorithm takes on `size` ranks for `nbytes`."""
    task = Task(size, nbytes, machine.ranks_per_node)
    return {name: machine.seconds(cost(task)) for name, cost in COSTS.items()}


def predictions(machine: Machine, ranks: Sequence[int]) -> list[Prediction]:
    """For all sizes, on all these numbers of ranks."""
    rows = []
    for nbytes in SIZES:
        for size in ranks:
            times = seconds(machine, size, nbytes)
            winner = min(times, key=times.__getitem__)
            rows.append(Prediction(size=nbytes, world_size=size, winner=winner, seconds=times))
    return rows


def predict_cluster(machine: Machine) -> ScaleResult:
    """What is to be expected of a cluster that nobody has measured."""
    cluster = predictions(machine, CLUSTER)
    return ScaleResult(parameters=machine, fit=None, plan=None, predictions=Predictions(host=None, cluster=cluster))
