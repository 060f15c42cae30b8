"""Recursive doubling: few steps, whole tensors, and some care where the number of ranks is no power of two."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs


def cases(rank: int, size: int, seed: int) -> Cases:
    power = 1 << size.bit_length() - 1
    partners = [rank ^ 1 << bit for bit in range(power.bit_length() - 1)]
    extra = [rank + power] if rank + power < size else []
    receivers = [rank - power] if rank >= power else partners + extra
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=dict.fromkeys(receivers, len(tensor)))
