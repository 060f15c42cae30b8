"""A further step of rpc: what becomes of an exception."""

from __future__ import annotations

import torch.distributed as dist

from playground.lessons.rpc.lesson import Agent


def remote_exception(rank: int, size: int) -> dict[str, str | None]:
    """An exception that is raised there is raised here, with the traceback from there. Only rank 1
    knows the answer.

    | rank | answer                              | traceback_ends_in                   |
    |------|-------------------------------------|-------------------------------------|
    | 0    | "42"                                | None                                |
    | 1    | "LookupError: rank 2 does not know" | "LookupError: rank 2 does not know" |
    | 2    | "LookupError: rank 0 does not know" | "LookupError: rank 0 does not know" |
    """
    with Agent() as agent:
        try:
            return {
                "answer": agent.call((rank + 1) % size, answer_as_rank_1),
                "traceback_ends_in": None,
            }
        except RuntimeError as error:
            told = str(error.__cause__).splitlines()
            return {"answer": str(error), "traceback_ends_in": told[-1]}


def answer_as_rank_1() -> str:
    if dist.get_rank() != 1:
        raise LookupError(f"rank {dist.get_rank()} does not know")
    return "42"
