"""Receive from whoever sends: the sender is what recv returns, and tags keep kinds of messages apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from playground.exercises.cases import Case, coded
from playground.exercises.exercise import Exercise, Mistake

RECEIVE = "dist.recv(arrived, tag=PARCEL)\n        "
EXERCISE = Exercise(
    module=__name__,
    number=7,
    worlds=(2, 3, 5, 4),
    forbidden=("gather", "gather_object"),
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
    for place, order in enumerate(("in order", "last rank first", "letters last rank first")):
        given = [(coded(other, 3), 2 * coded(other, 3)) for other in range(size)]
        returns = [list(each) for each in zip(*given, strict=True)] if rank == 0 else None
        delay = 0.08 * (size - rank if place == 1 else rank)
        run = partial(send_slowly, rank, size, given[rank]) if place == 2 else None
        yield Case(f"they come {order}", given[rank], returns=returns, delay=delay, run=run)


def send_slowly(rank: int, size: int, given: tuple[object, object], function: Callable[..., object]) -> object:
    """Between a parcel and its letter lies the longer, the lower the rank is."""
    import torch.distributed as dist

    real = dist.send

    def send(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        time.sleep(0.16 * (size - rank))

    dist.send = send
    try:
        return function(rank, size, *given)
    finally:
        dist.send = real
