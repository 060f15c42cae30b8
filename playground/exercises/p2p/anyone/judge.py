"""Receive from whoever sends: the sender is what recv returns, and tags keep kinds of messages apart."""

from __future__ import annotations

from collections.abc import Iterator

from playground.exercises.cases import Case, coded
from playground.exercises.exercise import GATHERS, Exercise, Mistake

RECEIVE = "dist.recv(arrived, tag=PARCEL)\n        "
EXERCISE = Exercise(
    module=__name__,
    number=7,
    worlds=(2, 3, 5, 4),
    forbidden=("gather", "gather_object", *GATHERS),
    mistakes=(
        Mistake(
            "assumes an order",
            {"for _ in": "for sender in", "parcels[dist.recv(arrived, tag=PARCEL)] =": f"{RECEIVE}parcels[sender] ="},
            "they arrive as they come: recv returns the sender",
        ),
        Mistake(
            "shared tag",
            {"tag=PARCEL": "tag=0", "tag=LETTER": "tag=0"},
            "a letter was taken for a parcel: only their tags tell them apart",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Iterator[Case]:
    for place, order in enumerate(("in order", "last rank first")):
        given = [(coded(other, 3), 2 * coded(other, 3)) for other in range(size)]
        returns = [list(each) for each in zip(*given, strict=True)] if rank == 0 else None
        delay = 0.08 * (size - rank if place else rank)
        yield Case(f"they come {order}", given[rank], returns=returns, delay=delay)
