"""A collective of messages, from any root."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import DEADLOCK, ERROR, Exercise, Mistake

EXERCISE = Exercise(
    forbidden=("broadcast", "broadcast_object_list", "scatter", "all_reduce"),
    mistakes=(
        Mistake(
            "root 0 assumed", {"rank == root": "rank == 0", "other != root": "other != 0", "tensor, root": "tensor, 0"}
        ),
        Mistake("sends to itself", {"if other != root:": "if True:"}, "torch refuses that", ERROR),
        Mistake(
            "only to the right neighbour", {"range(size)": "[(root + 1) % size]"}, "the others wait for ever", DEADLOCK
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs()):
        root = (place + seed) % size
        tensor = give(rank)
        yield Case(f"{about}, root {root}", (tensor, root), held=tensor, expected=give(root))
