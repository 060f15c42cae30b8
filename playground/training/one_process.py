"""Trainings of the tiny GPT beside that of one process: results, and their check. Does not import
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from playground.base.errors import PlaygroundError

EXACT_STEPS, EXACT = 5, 1e-12
"""Steps in float64, and how far losses and parameters may then be from one process's: sums are
rounded differently."""
CLOSE = 0.05
"""Fraction by which a count may differ from its closed form."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, as one rank saw it. Its counts are those of the last step."""

    losses: list[float]
    """Those of the whole batch, by step."""
    first: float
    last: float
    step_seconds: float
    """The median over all steps but the first."""
    messages: int
    """Calls that send or receive."""
    sent: float
    """Bytes that this rank sent."""
    kept: int
    """Bytes that autograd kept for backward, at most."""
    calls: dict[str, int]
    """The `messages`, by operation."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The largest difference of a loss from one process's, and of a parameter."""

    loss_difference: float
    parameter_difference: float

    @property
    def largest(self) -> float:
        return max(self.loss_difference, self.parameter_difference)


@dataclass(frozen=True, kw_only=True)
class ComparedTraining(Training, Differences):
    """A training, and how far the same few steps in float64 are from one process's."""


def check(
    way: str, found: ComparedTraining, forms: Mapping[str, float], device: str = "cpu"
) -> None:
    """Raise `PlaygroundError` if a way is not one process's training, or a count is not that of its
    closed form."""
    check_exact(way, found.loss_difference, found.parameter_difference)
    check_counts(way, vars(found), forms, device)


def check_exact(way: str, *differences: float) -> None:
    """Raise `PlaygroundError` if a difference from one process is more than rounding, or NaN."""
    if wrong := [each for each in differences if not each <= EXACT]:
        raise PlaygroundError(
            f"{way}: differs by {max(wrong):.1e} from one process, more than rounding ({EXACT:.0e})"
        )


def check_counts(
    what: str, counts: Mapping[str, float], forms: Mapping[str, float], device: str = "cpu"
) -> None:
    """Raise `PlaygroundError` if a count is not that of its closed form. What attention keeps is
    held to it on CPUs alone: elsewhere the kernel decides."""
    for key, form in forms.items():
        if not abs(counts[key] - form) <= CLOSE * form and (device == "cpu" or key != "kept"):
            raise PlaygroundError(
                f"{what}: {key}: counted {counts[key]:,.2f}, and the closed form is {form:,.2f}"
            )
