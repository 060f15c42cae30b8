"""Every algorithm's time for any number of ranks and bytes, and which of them wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from playground.measure.costs import COSTS
from playground.measure.model import Machine, Task

SIZES = [4 << 2 * step for step in range(15)]
"""Bytes: 4 B to 1 GiB."""
HOST = [2**power for power in range(1, 8)]
CLUSTER = [2**power for power in range(1, 17)]
"""Ranks: as many as one host takes, and up to 65,536."""


def seconds(machine: Machine, size: int, nbytes: int) -> dict[str, float]:
    """What each algorithm takes on `size` ranks for `nbytes`."""
    task = Task(size, nbytes, machine.ranks_per_node)
    return {name: machine.seconds(cost(task)) for name, cost in COSTS.items()}


def predictions(machine: Machine, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """For all sizes, on all these numbers of ranks: every algorithm's seconds, and the name of the fastest."""
    rows = []
    for nbytes in SIZES:
        for size in ranks:
            times = seconds(machine, size, nbytes)
            rows.append(
                {"size": nbytes, "world_size": size, "winner": min(times, key=times.__getitem__), "seconds": times}
            )
    return rows
