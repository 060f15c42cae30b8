"""Two groups: every rank makes both, in the same order, and roots are named by their ranks in the world."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import ERROR, Exercise, Mistake

EVENS = "    evens = dist.new_group([*range(0, size, 2)])\n"
ODDS = "    odds = dist.new_group([*range(1, size, 2)])\n"
EXERCISE = Exercise(
    worlds=(4, 5),
    mistakes=(
        Mistake(
            "only members create", {EVENS: "    if rank % 2 == 0:\n    " + EVENS, ODDS: "    if rank % 2:\n    " + ODDS}
        ),
        Mistake("another order", {EVENS: "", ODDS: f"    if rank == 0:\n    {EVENS}{ODDS}    if rank:\n    {EVENS}"}),
        Mistake("group rank for world rank", {"src=rank % 2": "src=0"}, "src is a rank of the world", ERROR),
        Mistake("one group for all", {"odds if rank % 2 else evens": "None", "src=rank % 2": "src=0"}),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs(6, 7):
        tensor = give(rank)
        yield Case(about, (tensor,), held=tensor, expected=give(rank % 2))
