"""How long every algorithm takes on real ranks, in groups of several sizes of one world.

Groups of one world, and not a world for each size, so that all can be timed in turn, round after round: what else the
machine does meanwhile then meets all alike. Ranks outside a group wait without using a core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import ALGORITHMS
from playground.measure.fit import Key
from playground.measure.model import ELEMENT
from playground.measure.timing import slowest
from playground.runtime import report

BLOCK = 0.004
"""Seconds that the calls timed together are to take, so that starting them does not count."""
MOST_CALLS = 50


def measure(
    rank: int, size: int, names: Sequence[str], plan: dict[int, list[int]], seconds: float
) -> dict[Key, list[float]]:
    """Seconds a call on this rank, round by round, of every algorithm for every (group's size, bytes) of the plan.

    Rounds begin until `seconds` have passed. The one before the first warms up, and finds how many calls fill a block.
    """
    groups = {members: dist.new_group(list(range(members))) for members in plan}
    calls: dict[Key, int] = {}
    times: dict[Key, list[float]] = {}
    turns = [(members, nbytes) for members, sizes in plan.items() for nbytes in sizes]
    for number in rounds(seconds):
        for members, nbytes in turns:
            report(round=number)
            dist.barrier()
            for name in rotated(names, number) if rank < members else ():
                key = (name, members, nbytes)
                took = time_calls(name, nbytes, groups[members], calls.get(key, 1))
                if number == 0:
                    calls[key] = calls_for(took, groups[members])
                else:
                    times.setdefault(key, []).append(took)
    return times


def rounds(seconds: float) -> Iterator[int]:
    """0, 1, and on until so many seconds have passed on rank 0: the same numbers on every rank."""
    ends = time.perf_counter() + seconds
    number, goes_on = 0, torch.ones(1)
    while goes_on:
        yield number
        number += 1
        goes_on.fill_(number < 2 or time.perf_counter() < ends)
        dist.broadcast(goes_on, 0)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Each round begins with another: the first one may meet the ranks that are still leaving the barrier."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def time_calls(name: str, nbytes: int, group: Any, calls: int) -> float:
    """Seconds a call of several in a row, all ranks of the group starting together."""
    tensor = torch.zeros(nbytes // ELEMENT)
    all_reduce = ALGORITHMS[name]
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(calls):
        all_reduce(tensor, group=group)
    return (time.perf_counter() - started) / calls


def calls_for(seconds: float, group: Any) -> int:
    """How many calls fill a block: the same number on every rank."""
    [longest] = slowest([seconds], group)
    return max(1, min(MOST_CALLS, int(BLOCK / longest)))
