"""The whole ring: a reduce-scatter, then the sums go round once more. No rank sends two whole tensors."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=2 * (size - 1) * -(-len(tensor) // size))
