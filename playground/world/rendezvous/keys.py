"""The keys of the store of a world: who writes each, and who reads it.

In torchrun's store, which is one for all starts of a world, whose parts have the start's number:

    waits(rank)         written by a rank: the process that has come; read by rank 0
    answer_to(process)  written by rank 0: the number of the start; read by that process
    ATTEMPTS            counted up by rank 0, once in each start
    members_of(number)  counted up by a rank that knows the number; read by rank 0

Where ranks come together and leave:

    is_here(rank)       written by a rank that has come; read by one that has waited too long
    HERE                counted up by each rank that has come
    MISSING             written by the last that comes, or by one that has waited too long: who has
                        not come; read by all
    GONE                counted up by each rank that leaves
    EVERYONE_GONE       written by the last of them; rank 0 waits for it
    CLOSE               written by ranks when all have come; the process that serves the store waits
    ALONE               its answer: the stranger that has come, or nothing; read by those ranks

Where they watch each other:

    address(rank)       written by a rank: where its process is; read by all
    left(rank)          written by a rank that leaves in order; read by all, which do not miss it
    LOSS                written by the first that notices a loss; read by all
    ACKNOWLEDGED        counted up by each rank that knows of it; read by one that is about to leave

Standing still is told by keys of `explain.hang.exchange`. Each process group has a part of its
own, by the name that `member` gives it, which also counts the ranks on which the group stands.
"""

from __future__ import annotations

ATTEMPTS = "attempts"
HERE, MISSING = "here", "missing"
GONE, EVERYONE_GONE = "gone", "everyone is gone"
CLOSE, ALONE = "all ranks have come", "whether they are alone"
LOSS, ACKNOWLEDGED = "loss", "acknowledged"


def waits(rank: int) -> str:
    return f"rank {rank} waits"


def answer_to(process: str) -> str:
    return f"attempt of {process}"


def members_of(attempt: int) -> str:
    return f"members of attempt {attempt}"


def is_here(rank: int) -> str:
    return f"rank {rank} is here"


def address(rank: int) -> str:
    return f"rank {rank}"


def left(rank: int) -> str:
    return f"rank {rank} left"
