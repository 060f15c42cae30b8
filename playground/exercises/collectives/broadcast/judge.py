"""A collective of messages, from any root."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for place, (about, give) in enumerate(inputs()):
        root = (place + seed) % size
        tensor = give(rank)
        yield Case(f"{about}, root {root}", (tensor, root), held=tensor, expected=give(root))
