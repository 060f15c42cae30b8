"""The first message: from rank 0 to rank 1, past all others."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases, inputs
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake

EXERCISE = Exercise(
    worlds=(2, 3, 5),
    mistakes=(
        Mistake("wrong peer", {"dst=1": "dst=size - 1"}, "rank 1 is not the last one in a larger world", DEADLOCK),
        Mistake("bystanders receive", {"elif rank == 1:": "else:"}, "nobody sends them anything", DEADLOCK),
        Mistake(
            "sent the wrong way",
            {"send(tensor, dst=1)": "recv(tensor, src=1)", "recv(tensor, src=0)": "send(tensor, dst=0)"},
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, give in inputs():
        tensor = give(rank)
        most = {1: len(tensor)} if rank == 0 else {}
        yield Case(about, (tensor,), held=tensor, expected=give(0 if rank == 1 else rank), most=most)
