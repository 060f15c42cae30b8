"""Recursive doubling: few steps, whole tensors, and some care where the number of ranks is no power of two."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import DEADLOCK, ERROR, Exercise, Mistake

GIVES = """\
    if rank >= power:
        dist.send(tensor, rank - power)
        dist.recv(tensor, rank - power)
        return
    if rank + power < size:
        dist.recv(theirs, rank + power)
        tensor += theirs
"""
LEAVES_OUT = """\
    if rank >= power:
        dist.recv(tensor, rank - power)
        return
"""
RETURNS = "    if rank + power < size:\n        dist.send(tensor, rank + power)\n"
SWAP = """\
        request = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        request.wait()
        tensor += theirs
"""
EXERCISE = Exercise(
    worlds=(2, 4, 3, 5, 1),
    forbidden=("all_reduce",),
    mistakes=(
        Mistake(
            "powers of two only",
            {GIVES: "", RETURNS: "", "while distance < power": "while distance < size"},
            "with 3 ranks, rank 1 has no partner at distance 2",
            ERROR,
        ),
        Mistake(
            "skips a step without a partner",
            {
                GIVES: "",
                RETURNS: "",
                "while distance < power": "while distance < size",
                SWAP: "        if partner < size:\n" + SWAP.replace("        ", " " * 12),
            },
            "powers of two only: with 3 ranks, rank 1 has no partner at distance 2",
        ),
        Mistake(
            "no result for those who sat out",
            {RETURNS: "", "        dist.recv(tensor, rank - power)\n": ""},
            "each gets it from the rank that has its tensor",
        ),
        Mistake("leaves out those who sit out", {GIVES: LEAVES_OUT}, "their tensors belong to the sum"),
        Mistake(
            "the distance is added, not flipped",
            {"rank ^ distance": "(rank + distance) % power"},
            "my partner's partner must be me",
            DEADLOCK,
        ),
        Mistake("the distance grows by one", {"distance *= 2": "distance += 1"}, "it must double: 1, 2, 4, …"),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    power = 1 << size.bit_length() - 1
    partners = [rank ^ 1 << bit for bit in range(power.bit_length() - 1)]
    extra = [rank + power] if rank + power < size else []
    receivers = [rank - power] if rank >= power else partners + extra
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=dict.fromkeys(receivers, len(tensor)))
