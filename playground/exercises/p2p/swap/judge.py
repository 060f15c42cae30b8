"""Two ranks exchange tensors, and only the order of their calls keeps them from waiting for each other."""

from __future__ import annotations

from collections.abc import Iterator

from playground.exercises.cases import Case, inputs
from playground.exercises.exercise import DEADLOCK, ERROR, GATHERS, OWN, Exercise, Mistake

EXERCISE = Exercise(
    module=__name__,
    number=4,
    forbidden=("all_to_all", "all_to_all_single", *GATHERS),
    mistakes=(
        Mistake("both send first", {"rank < partner < size": "partner < size"}, status=DEADLOCK),
        Mistake("both receive first", {"rank < partner < size": "False"}, status=DEADLOCK),
        Mistake("overwritten before it was sent", {"recv(theirs, partner)": "recv(tensor, partner)"}),
        Mistake("the last rank has no partner", {"partner < size": "True"}, "with an odd number it stays alone", ERROR),
    ),
)


def cases(rank: int, size: int, seed: int) -> Iterator[Case]:
    partner = rank ^ 1 if rank ^ 1 < size else rank
    for about, give in inputs():
        tensor = give(rank)
        yield Case(about, (tensor,), returns=give(partner), held={OWN: tensor}, expected={OWN: give(rank)})
