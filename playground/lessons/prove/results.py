"""What the experiment measured. Plain data: reading it does not import torch. What it means: verdict.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class MaxAbs:
    """The largest absolute value of any element."""

    gradients: float | None
    """None in local SGD: every rank steps by a gradient of its own, so none is the mean, and none can be compared."""
    parameters: float


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """What one process and the ranks had after a step; each figure is the largest on any rank."""

    step: int
    """1 for the first."""
    largest: MaxAbs
    """Of what the one process has: the magnitude that the differences are to be read against."""
    differences: dict[str, MaxAbs]
    """Of what the ranks have from what the one process has, by gradient synchronisation."""


class Figure(NamedTuple):
    """One difference, and where it is from."""

    step: int
    sync: str
    quantity: str
    """gradients or parameters."""
    difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """N ranks against one process, in one dtype."""

    epsilon: float
    """The distance from 1 to the next number of that dtype."""
    steps: list[ComparedStep]

    def figures(self) -> Iterator[Figure]:
        """Every difference that there is, in order."""
        for step in self.steps:
            for sync, difference in step.differences.items():
                if difference.gradients is not None:
                    yield Figure(step.step, sync, "gradients", difference.gradients)
                yield Figure(step.step, sync, "parameters", difference.parameters)

    @property
    def max_difference(self) -> float:
        """Of any gradient or parameter, after any step."""
        return max(figure.difference for figure in self.figures())

    @property
    def in_epsilons(self) -> float:
        """The same, in units of this dtype's epsilon."""
        return self.max_difference / self.epsilon

    @property
    def final_difference(self) -> float:
        """Of any parameter, after the last step."""
        return max(difference.parameters for difference in self.steps[-1].differences.values())


@dataclass(frozen=True, kw_only=True)
class Proof:
    float64: Comparison
    float32: Comparison

    @property
    def by_dtype(self) -> dict[str, Comparison]:
        return {"float64": self.float64, "float32": self.float32}


@dataclass(frozen=True, kw_only=True)
class BreakResult:
    """What a failure mode came to: the largest differences on any rank, each by what differs from what."""

    breaks: dict[str, float]
    """What is wrong."""
    holds: dict[str, float]
    """What must be rounding and no more, if the failure mode is what it is said to be."""


@dataclass(frozen=True, kw_only=True)
class ProveResult:
    proof: Proof
    breaks: dict[str, BreakResult]
    """By failure mode, in order; empty for one rank, which has nobody to differ from."""
