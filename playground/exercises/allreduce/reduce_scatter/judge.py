"""The first half of the ring: every chunk travels round once, and is added to on its way."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        chunks = tensor.tensor_split(size)
        most = {(rank + 1) % size: len(tensor) - len(chunks[rank])}
        yield Case(about, (tensor,), held=chunks[rank], expected=total.tensor_split(size)[rank], most=most)
