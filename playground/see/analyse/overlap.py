"""The overlap of communication with computation, as torchtitan logs it: computation + communication - their union.

Source: https://github.com/pytorch/torchtitan, its metrics
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from playground.see.analyse import BLOCKING, Timeline, subtract, total, union
from playground.see.record import BUCKET, COMPUTE, Recording


@dataclass(frozen=True)
class Overlap:
    """The seconds that a rank spent on both."""

    rank: int
    compute: float
    """Time of computation, without the waits in it."""
    communication: float
    """Time in which a message, collective or bucket was posted and not yet over."""
    overlap: float

    @property
    def hidden(self) -> float:
        """The share of communication, 0 to 1, with computation beside it."""
        return self.overlap / self.communication


def overlaps(recording: Recording) -> list[Overlap]:
    """The overlap on every rank that trains and communicates, from its first forward pass on. (A barrier moves no
    bytes, and is no communication.)"""
    timeline, found = Timeline(recording), []
    waits = [*timeline.waits()]
    for rank in recording.ranks:
        first = next((event.start for event in rank.events if event.name == "forward"), inf)
        issued = (event for event in rank.events if event.start >= first and not rank.runs_ahead)
        over = [event for event in issued if isfinite(event.end)]
        waited = [(wait.start, wait.end) for wait in waits if wait.rank == rank.rank]
        compute = subtract(((event.start, event.end) for event in over if event.kind == COMPUTE), waited)
        moves = (event for event in over if event.kind in (*BLOCKING, BUCKET) and event.nbytes > 0)
        communication = union((event.start, event.end) for event in moves)
        if communication and any(event.name == "backward" for event in over):
            sums = total(compute), total(communication)
            found.append(Overlap(rank.rank, *sums, max(0.0, sum(sums) - total(union([*compute, *communication])))))
    return found
