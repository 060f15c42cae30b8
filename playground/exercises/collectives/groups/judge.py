"""Two groups: every rank makes both, in the same order, and roots are named by their ranks in the world."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs(6, 7):
        tensor = give(rank)
        yield Case(about, (tensor,), held=tensor, expected=give(rank % 2))
