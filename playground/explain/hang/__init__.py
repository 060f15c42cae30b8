"""The latest operations of each rank, in memory that outlives it: why a run stands still can be
told without having recorded it. Does not import torch.

    states       an operation, a rank at one moment, and the kinds of diagnosis

In a rank, what is written:

    recording    its flight recorder, and its groups' own counts
    hooks        operations
    functional   functional collectives
    ddp          what DistributedDataParallel calls
    queues       the streams of its GPU
    sources      the line of the program that calls
    box          the memory that they are written to
    box_format   its format
    activity     what else may act in the process
    idle         threads that only others can wake

From the states of all ranks to a diagnosis:

    streams      ranks whose streams stand still
    wait_graph   who waits for whom
    differences  what ranks called differently
    diagnosis    why they stand still
    wording      a diagnosis in words
    judge        whether a deadlock is proved
    exchange     states of ranks that somebody else has started
    standstill   tells of a run that stands still without proof
    neighbours   such a run, of ranks that somebody else has started
    workers      ranks that wait for a worker of their DataLoader
"""

from __future__ import annotations

from playground.explain.hang.states import (
    COLLECTIVE,
    MAKE_DDP,
    NEW_GROUP,
    RECEIVE,
    SPLIT_GROUP,
    STRANGERS,
    UNASKED,
    Doing,
    Kind,
    Operation,
    RankState,
)

__all__ = [
    "COLLECTIVE",
    "MAKE_DDP",
    "NEW_GROUP",
    "RECEIVE",
    "SPLIT_GROUP",
    "STRANGERS",
    "UNASKED",
    "Doing",
    "Kind",
    "Operation",
    "RankState",
]
