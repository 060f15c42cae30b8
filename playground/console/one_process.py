"""Shared by the lessons that cut the tiny GPT: how exact they are, the table of a training, and its
check. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from playground.console.tables import figures
from playground.runtime.errors import PlaygroundError

EXACT_STEPS, EXACT = 5, 1e-12
"""Steps in float64, and how far losses and parameters may then be from one process's: sums are
rounded differently."""
CLOSE = 0.05
"""Fraction by which a count may differ from its closed form."""
COMPARED = f"differences are those after {EXACT_STEPS} steps of AdamW in float64"
TRAINED = figures(
    ("step_seconds", "step", "ms", ".1f", 1000),
    ("first", "first\nloss", "", ".3f"),
    ("last", "last\nloss", "", ".3f"),
    ("loss_difference", "loss, from\none process", "", ".1e"),
    ("parameter_difference", "parameters, from\none process", "", ".1e"),
)


def check(
    way: str, found: Mapping[str, Any], forms: Mapping[str, float], device: str = "cpu"
) -> None:
    """Raise `PlaygroundError` if a way is not one process's training, or a count is not that of its
    closed form."""
    if (
        not (largest := max(found.get(f"{what}_difference", 0.0) for what in ("loss", "parameter")))
        <= EXACT
    ):
        raise PlaygroundError(
            f"{way}: differs by {largest:.1e} from one process, more than rounding ({EXACT:.0e})"
        )
    check_counts(way, found, forms, device)


def check_counts(
    what: str, found: Mapping[str, Any], forms: Mapping[str, float], device: str = "cpu"
) -> None:
    """Raise `PlaygroundError` if a count is not that of its closed form. What attention keeps is
    held to it on CPUs alone: elsewhere the kernel decides."""
    for key, form in forms.items():
        if not abs(found[key] - form) <= CLOSE * form and (device == "cpu" or key != "kept"):
            raise PlaygroundError(
                f"{what}: {key}: counted {found[key]:,.2f}, and the closed form is {form:,.2f}"
            )
