"""What `scale` finds out. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from playground.algorithms.cost_model import Machine
from playground.tools.scale.plan import Plan, Sample


@dataclass(frozen=True)
class Point(Sample):
    """A measurement beside what the model predicts."""

    error: float
    """By how much of what was measured the prediction is too long (or, negative, too short)."""
    fitted: bool
    """Whether the model was fitted to it; the others it has never seen."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the model describes what was measured."""

    points: list[Point]
    median_error: float
    """Of the absolute errors of the points that were not fitted to."""
    worst_error: float
    """The largest of them."""

    @property
    def unseen(self) -> list[Point]:
        """The points that were not fitted to."""
        return [point for point in self.points if not point.fitted]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Every algorithm's time for one size of tensor and one number of ranks."""

    size: int
    """Bytes of the tensor."""
    world_size: int
    winner: str
    """The fastest algorithm."""
    seconds: dict[str, float]
    """By algorithm."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """For all sizes and numbers of ranks."""

    host: list[Prediction] | None
    """With all ranks on one host's cores; None if none was measured."""
    cluster: list[Prediction]
    """With every rank on cores and a link of its own."""


@dataclass(frozen=True, kw_only=True)
class ScaleResult:
    """The machine, how well the model describes it, and what it predicts."""

    parameters: Machine
    fit: Fit | None
    """None if the machine was given, and not measured."""
    plan: Plan | None
    """What was measured."""
    predictions: Predictions


def fit_of(points: Sequence[Point]) -> Fit:
    """How well the model predicts what it was not fitted to."""
    errors = [abs(point.error) for point in points if not point.fitted]
    return Fit(points=list(points), median_error=median(errors), worst_error=max(errors))
