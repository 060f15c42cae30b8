"""Do N ranks equal one process, up to rounding? Is each failure mode what it is said to be? Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from playground.lessons.prove.results import BreakResult, Proof, ProveResult
from playground.runtime.errors import PlaygroundError

EXACT = 1e-12
"""How far float64 may be from one process after any step, and float32, in as many epsilons, after the first.

Later, float32 may be further away, and nothing is wrong: of two numbers that differ by rounding, a max-pool may choose
the other one, and gradients jump. (For float64 they must be 2^29 times as close. So float64 is the one that proves.)
"""
EPSILON = 2.0**-52
"""Of float64."""
UNEXPLAINED = 1e-6
"""What fraction of a break its explanation may leave open."""
JUMP = 100
"""So many times as many epsilons in float32 as in float64 are more than accumulated rounding."""
ADVICE = "rounding grows from step to step, faster with a larger --lr: try a smaller one, or fewer --steps"


def check(result: ProveResult) -> None:
    """Raise `PlaygroundError` if N ranks are not one process, or if a failure mode is not what it is said to be."""
    check_proof(result.proof)
    check_breaks(result.breaks)


def check_proof(proof: Proof) -> None:
    """Raise `PlaygroundError` if N ranks differ from one process by more than rounding."""
    if wrong := failure(proof):
        raise PlaygroundError(wrong)


def check_breaks(breaks: Mapping[str, BreakResult]) -> None:
    """Raise `PlaygroundError` if some failure mode's explanation leaves more than rounding unexplained."""
    for name, result in breaks.items():
        bound = max(EXACT, UNEXPLAINED * max(result.breaks.values()))
        for quantity, difference in result.holds.items():
            if not difference <= bound < math.inf:
                raise PlaygroundError(
                    f"{name}: {quantity}: {difference:.1e} should be rounding (at most {bound:.1e}), so this break is "
                    f"not what it is said to be; {ADVICE}"
                )


def failure(proof: Proof) -> str:
    """The first difference that is more than rounding, in words; empty if N ranks equal one process."""
    for dtype, comparison in proof.by_dtype.items():
        bound = EXACT * comparison.epsilon / EPSILON
        at_first: dict[tuple[str, str], float] = {}
        for step, sync, quantity, difference in comparison.figures():
            first = at_first.setdefault((sync, quantity), difference)
            if (step == 1 or dtype == "float64") and not difference <= bound:
                before = f" ({first:.1e} after step 1)" if step > 1 else ""
                return (
                    f"{sync}: in {dtype} the {quantity} of N ranks and of one process differ by {difference:.1e} after "
                    f"step {step}{before}, more than rounding ({bound:.1e}); {ADVICE}"
                )
    return ""


def is_bit_identical(proof: Proof) -> bool:
    """Whether N ranks equal one process in every bit."""
    return all(comparison.max_difference == 0 for comparison in proof.by_dtype.values())


def has_jumps(proof: Proof) -> bool:
    """Whether float32 differs by more than rounding accounts for: gradients jumped, as `EXACT` says."""
    return proof.float32.in_epsilons > JUMP * proof.float64.in_epsilons


def is_broken(result: BreakResult) -> bool:
    """Whether the failure mode did make a difference beyond rounding."""
    return max(result.breaks.values()) > EXACT
