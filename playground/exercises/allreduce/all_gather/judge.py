"""The second half of the ring: what a rank has received, it passes on."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.observation import OWN


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, everyones = give(rank), [give(other) for other in range(size)]
        most, held = {(rank + 1) % size: len(tensor) * (size - 1)}, {OWN: tensor}
        yield Case(about, (tensor,), returns=everyones, held=held, expected={OWN: give(rank)}, most=most)
