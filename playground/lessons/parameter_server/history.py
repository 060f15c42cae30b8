"""The loss while it is being trained: against time, and against samples."""

from __future__ import annotations

import time
from math import ceil

from playground.lessons.parameter_server.results import Point

POINTS = 10
"""Of the curve that is shown."""


class LossHistory:
    """Counts from its making on. `per_step`: how many times `add` is called for a step of all workers."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.started, self.samples = time.perf_counter(), 0
        self.losses: list[tuple[float, int, float]] = []
        """(seconds, samples, their summed loss) of each gradient."""

    def add(self, loss: float, samples: int) -> None:
        """A gradient of so many samples has come, whose losses sum to `loss`."""
        self.samples += samples
        self.losses.append((time.perf_counter() - self.started, samples, loss))

    @property
    def seconds(self) -> float:
        """From the making to the last gradient."""
        return self.losses[-1][0]

    def points(self) -> list[Point]:
        """The curve: as many steps from one point to the next, the last few to the last."""
        points, seen = [], 0
        stride = self.per_step * ceil(len(self.losses) / self.per_step / POINTS)
        for first in range(0, len(self.losses), stride):
            part = self.losses[first : first + stride]
            samples = sum(number for _, number, _ in part)
            seen += samples
            loss = sum(loss for *_, loss in part) / samples
            points.append(Point(samples=seen, seconds=part[-1][0], loss=loss))
        return points
