"""A token goes round: somebody has to begin."""

from __future__ import annotations

import math

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import DEADLOCK, ERROR, OWN, Exercise, Mistake

BEGIN = "dist.send(token, 1)\n        dist.recv(token, size - 1)"
GO_ON = "dist.recv(token, rank - 1)\n        token += tensor\n        dist.send(token, (rank + 1) % size)"
EXERCISE = Exercise(
    worlds=(2, 3, 5, 4),
    mistakes=(
        Mistake("all receive first", {BEGIN: "dist.recv(token, size - 1)\n        dist.send(token, 1)"}, "", DEADLOCK),
        Mistake(
            "all send first",
            {GO_ON: "dist.send(token, (rank + 1) % size)\n        dist.recv(token, rank - 1)\n        token += tensor"},
            "send returns when the other rank receives",
            DEADLOCK,
        ),
        Mistake("no wrap-around", {"(rank + 1) % size": "rank + 1"}, "the right neighbour of the last is 0", ERROR),
        Mistake("passes on without adding", {"token += tensor": "pass"}),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, added = give(rank), range(size) if rank == 0 else range(rank + 1)
        total = sum(give(other) for other in added)
        most, held = {(rank + 1) % size: math.inf}, {OWN: tensor}
        yield Case(about, (tensor,), returns=total, held=held, expected={OWN: give(rank)}, most=most)
