"""How long every algorithm takes on real ranks, in groups of several sizes of one world.

Groups of one world, and not a world for each size, so that all can be timed in turn, round after
round: what else the machine does meanwhile then meets all alike. Ranks outside a group wait without
using a core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms import load_all_reduce
from playground.algorithms.cost_model import ELEMENT
from playground.base.host import cores, host_id, ranks_by_host
from playground.measurement.interleave import interleave, slowest, timed
from playground.tools.scale.plan import Effort, Group, Key, Plan, plan_for
from playground.world import report
from playground.world.rendezvous.agreement import all_gather_object

BLOCK = 0.004
"""Seconds that the calls timed together are to take, so that starting them does not count."""
MAX_CALLS = 50


def measure(rank: int, size: int, effort: Effort) -> tuple[Plan, dict[Key, list[float]]]:
    """The plan, and seconds per call on this rank, round by round, of every algorithm, in groups
    that suit the hosts of this world. Rank 0 reports the plan. Rounds begin until the effort's
    seconds have passed. The one before the first warms up, and finds how many calls fill a block.
    Raises `UsageError` for a world that cannot be measured."""
    hosts = ranks_by_host(all_gather_object(host_id()))
    plan = plan_for(hosts, effort, cores(), count_cores())
    if rank == 0:
        report(plan=plan)
    turns = []
    for group in plan.groups:
        process_group = dist.new_group(group.ranks)
        turns += [
            Turn(plan.algorithms, nbytes, group, process_group)
            for nbytes in (*group.fitted, *group.held_out)
        ]
    outcomes = interleave(turns, rounds(plan.seconds), Random(0))
    seconds = {
        (name, len(turn.ranks), turn.nbytes, turn.node): [seconds[name] for seconds in by_round[1:]]
        for turn, by_round in zip(turns, outcomes, strict=True)
        for name in by_round[0]
    }
    return plan, seconds


def count_cores() -> int:
    """Cores of all machines together: hosts that are containers or namespaces may share one. All
    ranks must call it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    machine = boot_id.read_text() if boot_id.exists() else host_id()
    return sum(dict(all_gather_object((machine, cores()))).values())


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

    def __init__(
        self, algorithms: Sequence[str], nbytes: int, group: Group, process_group: Any
    ) -> None:
        self.algorithms = algorithms
        self.nbytes = nbytes
        self.ranks = group.ranks
        self.node = group.node
        self.process_group = process_group
        self.calls = dict.fromkeys(algorithms, 1)
        """By algorithm, the calls that are timed together."""
        self.number = 0
        """Number of the round."""

    def __call__(self) -> dict[str, float]:
        """Seconds per call of each algorithm; nothing on a rank outside the group."""
        dist.barrier()
        number = self.number
        self.number = self.number + 1
        if dist.get_rank() not in self.ranks:
            return {}
        seconds = {}
        # different each round: it may meet ranks still leaving the barrier
        first = number % len(self.algorithms)
        for name in (*self.algorithms[first:], *self.algorithms[:first]):
            call = partial(
                load_all_reduce(name),
                torch.zeros(self.nbytes // ELEMENT),
                group=self.process_group,
            )
            seconds[name] = timed(call, self.calls[name], group=self.process_group)()
            if number == 0:  # find how many calls fill a block: the same number on every rank
                [longest] = slowest([seconds[name]], self.process_group)
                self.calls[name] = max(1, min(MAX_CALLS, int(BLOCK / longest)))
        return seconds
