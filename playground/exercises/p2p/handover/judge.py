"""The first message: from rank 0 to rank 1, past all others."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor = give(rank)
        most = {1: len(tensor)} if rank == 0 else {}
        yield Case(about, (tensor,), held=tensor, expected=give(0 if rank == 1 else rank), most=most)
