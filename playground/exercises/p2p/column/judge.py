"""A column is a view whose elements do not lie side by side: it is sent, and received, by way of a copy."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs(16, 16, 9):
        side = int(give(0).numel() ** 0.5)
        matrix, expected = give(rank).view(side, side), give(rank).view(side, side)
        index = side - 2
        if rank == 1:
            expected[:, index] = give(0).view(side, side)[:, index]
        most = side if rank == 0 else 0
        yield Case(about, (matrix, index), held=matrix, expected=expected, most=most)
