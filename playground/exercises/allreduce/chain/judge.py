"""All-reduce with nothing but send and recv: the sum goes along a line of ranks and comes back."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

BACK = "    if rank > 0:\n        dist.send(tensor, left)\n"
EXERCISE = Exercise(
    forbidden=("all_reduce",),
    mistakes=(
        Mistake(
            "the result is not sent back",
            {BACK: "", "        dist.recv(tensor, right)\n": ""},
            "the last rank alone has the total",
        ),
        Mistake(
            "the result comes back one rank only",
            {BACK: BACK.replace("rank > 0", "0 < rank == size - 1")},
            "every rank but the first passes it on",
            DEADLOCK,
        ),
        Mistake(
            "adds the result",
            {"        dist.recv(tensor, right)": "        dist.recv(theirs, right)\n        tensor += theirs"},
            "what comes back is the total already: it replaces the tensor",
        ),
        Mistake(
            "passes on what arrived",
            {"        tensor += theirs\n": "", "send(tensor, right)": "send(theirs if rank else tensor, right)"},
            "each rank has to add its own tensor first",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor, total = give(rank), sum(give(other) for other in range(size))
        yield Case(about, (tensor,), held=tensor, expected=total, most=dict.fromkeys((rank - 1, rank + 1), len(tensor)))
