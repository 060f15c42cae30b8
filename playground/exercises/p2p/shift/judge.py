"""Requests: between a call and its wait(), a tensor belongs to the backend."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs()):
        tensor = give(rank)
        yield Case(about, (tensor,), held=tensor, expected=give((rank - 1) % size), delay=0.02 * ((rank + place) % 2))
