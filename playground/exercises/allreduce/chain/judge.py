"""All-reduce with nothing but send and recv: the sum goes along a line of ranks and comes back."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=dict.fromkeys((rank - 1, rank + 1), len(tensor)))
