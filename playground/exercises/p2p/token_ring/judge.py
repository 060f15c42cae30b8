"""A token goes round: somebody has to begin."""

from __future__ import annotations

import math

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.observation import OWN


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, added = give(rank), range(size) if rank == 0 else range(rank + 1)
        total = sum(give(other) for other in added)
        most, held = {(rank + 1) % size: math.inf}, {OWN: tensor}
        yield Case(about, (tensor,), returns=total, held=held, expected={OWN: give(rank)}, most=most)
