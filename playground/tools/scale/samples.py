"""How long every algorithm takes on real ranks, in groups of several sizes of one world.

Groups of one world, and not a world for each size, so that all can be timed in turn, round after round: what else the
machine does meanwhile then meets all alike. Ranks outside a group wait without using a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce
from playground.algorithms.cost_model import ELEMENT
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import report
from playground.tools.scale.fit import Key, Plan

BLOCK = 0.004
"""Seconds that the calls timed together are to take, so that starting them does not count."""
MAX_CALLS = 50


def measure(rank: int, size: int, plan: Plan) -> dict[Key, list[float]]:
    """Seconds per call on this rank, round by round, of every algorithm for every (group's size, bytes) of the plan.

    Rounds begin until the plan's seconds have passed. The one before the first warms up, and finds how many calls fill
    a block.
    """
    planned = {**plan.fitted, **plan.held_out}
    groups = {members: dist.new_group(list(range(members))) for members in planned}
    turns = [
        Turn(plan.names, nbytes, members, groups[members]) for members, sizes in planned.items() for nbytes in sizes
    ]
    outcomes = interleave(turns, rounds(plan.seconds), Random(0))
    return {
        (name, turn.members, turn.nbytes): [seconds[name] for seconds in by_round[1:]]
        for turn, by_round in zip(turns, outcomes, strict=True)
        for name in by_round[0]
    }


def rounds(seconds: float) -> Iterator[int]:
    """0, 1, and on until so many seconds have passed on rank 0: the same numbers on every rank."""
    started = time.perf_counter()
    number, goes_on = 0, torch.ones(1)
    while goes_on:
        yield number
        number += 1
        passed = time.perf_counter() - started
        report(phase="measuring this host", step=min(passed, seconds), steps=seconds)
        goes_on.fill_(number < 2 or passed < seconds)
        dist.broadcast(goes_on, 0)


class Turn:
    """All algorithms, one after the other, on one group and one size of tensor."""

    def __init__(self, names: Sequence[str], nbytes: int, members: int, group: Any) -> None:
        self.names, self.nbytes, self.members, self.group = names, nbytes, members, group
        self.calls = dict.fromkeys(names, 1)
        self.number = 0
        """Of the round."""

    def __call__(self) -> dict[str, float]:
        """Seconds per call of each algorithm; nothing on a rank outside the group."""
        dist.barrier()
        number, self.number = self.number, self.number + 1
        if dist.get_rank() >= self.members:
            return {}
        seconds = {}
        for name in rotate(self.names, number):
            seconds[name] = timed(self.call_of(name), self.calls[name], group=self.group)()
            if number == 0:
                self.calls[name] = calls_for(seconds[name], self.group)
        return seconds

    def call_of(self, name: str) -> Callable[[], object]:
        all_reduce, tensor = load_all_reduce(name), torch.zeros(self.nbytes // ELEMENT)
        return lambda: all_reduce(tensor, group=self.group)


def rotate(names: Sequence[str], by: int) -> list[str]:
    """Each round begins with another: the first one may meet the ranks that are still leaving the barrier."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def calls_for(seconds: float, group: Any) -> int:
    """How many calls fill a block: the same number on every rank."""
    [longest] = slowest([seconds], group)
    return max(1, min(MAX_CALLS, int(BLOCK / longest)))
