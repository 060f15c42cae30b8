"""How long every algorithm takes on real ranks, in groups of several sizes of one world.

Groups of one world, and not a world for each size, so that all can be timed in turn, round after round: what else the
machine does meanwhile then meets all alike. Ranks outside a group wait without using a core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce
from playground.algorithms.cost_model import ELEMENT
from playground.measurement import Fields
from playground.measurement.interleave import interleave, slowest, timed
from playground.runtime import report
from playground.tools.scale.plan import COSTS, Key

BLOCK = 0.004
"""Seconds that the calls timed together are to take, so that starting them does not count."""
MAX_CALLS = 50


def measure(rank: int, size: int, plan: Fields) -> dict[Key, list[float]]:
    """Seconds per call on this rank, round by round, of every algorithm, in the groups of the plan. Rounds begin until
    its seconds have passed. The one before the first warms up, and finds how many calls fill a block."""
    turns = []
    for members, sizes in (plan["fitted"] | plan["held_out"]).items():
        group = dist.new_group(range(members))
        turns += [Turn(nbytes, members, group) for nbytes in sizes]
    outcomes = interleave(turns, rounds(plan["seconds"]), Random(0))
    return {
        (name, turn.size, turn.nbytes): [seconds[name] for seconds in by_round[1:]]
        for turn, by_round in zip(turns, outcomes, strict=True)
        for name in by_round[0]
    }


def rounds(seconds: float) -> Iterator[int]:
    """Numbers from 0 on, until `seconds` have passed on rank 0: the same on every rank."""
    started = time.perf_counter()
    number, goes_on = 0, torch.ones(1)
    while goes_on:
        yield number
        number += 1
        passed = time.perf_counter() - started
        report(phase="measuring", step=min(passed, seconds), steps=seconds)
        goes_on.fill_(number < 2 or passed < seconds)
        dist.broadcast(goes_on, 0)


class Turn:
    """All algorithms, one after the other, on one group and one size of tensor."""

    def __init__(self, nbytes: int, size: int, group: Any) -> None:
        """The group has the first `size` ranks."""
        self.nbytes, self.size, self.group = nbytes, size, group
        self.names, self.calls = [*COSTS], dict.fromkeys(COSTS, 1)
        self.number = 0
        """Number of the round."""

    def __call__(self) -> dict[str, float]:
        """Seconds per call of each algorithm; nothing on a rank outside the group."""
        dist.barrier()
        number, self.number = self.number, self.number + 1
        if dist.get_rank() >= self.size:
            return {}
        seconds = {}
        first = number % len(self.names)  # different each round: it may meet ranks still leaving the barrier
        for name in (*self.names[first:], *self.names[:first]):
            call = partial(load_all_reduce(name), torch.zeros(self.nbytes // ELEMENT), group=self.group)
            seconds[name] = timed(call, self.calls[name], group=self.group)()
            if number == 0:  # find how many calls fill a block: the same number on every rank
                [longest] = slowest([seconds[name]], self.group)
                self.calls[name] = max(1, min(MAX_CALLS, int(BLOCK / longest)))
        return seconds
