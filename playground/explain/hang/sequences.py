"""The order in which ranks call the collectives of a group, and the first place at which they
differ.

A backend joins the collectives of a group by their place in that order and by nothing else: the
fifth call of one rank meets the fifth call of every other rank, whatever function it is. What
DistributedDataParallel does in C++ has its place among the calls of the program.

Source: ProcessGroupGloo's nextTag() and ProcessGroupNCCL's seqCollective_ (torch 2.15)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from playground.explain.hang import (
    BACKWARD,
    BUCKETS,
    BUFFERS,
    COLLECTIVE,
    MAKE_DDP,
    Channel,
    Operation,
    RankState,
)

ORDERED = COLLECTIVE, MAKE_DDP, BUFFERS, BUCKETS, BACKWARD
"""The channels whose calls a group counts together. The other collectives meet in the store."""
MOST_EXTRA = 64
"""Largest number of calls of one rank that are looked for among those of another."""
Group = tuple[tuple[int, ...], int]
"""The ranks of a group, and its number."""
Calls = Mapping[int, Operation]
"""The calls of a rank on a group, by their place. The earliest may be missing."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Calls that some ranks have made where others go on without them."""

    calls: tuple[Operation, ...]
    """At least one, in their order."""
    callers: frozenset[int]
    others: frozenset[int]
    evidence: int
    """Number of later calls that are the same without them."""

    @property
    def weight(self) -> tuple[int, int]:
        """The less, the better it explains a difference."""
        return len(self.calls), -self.evidence


def group_of(channel: Channel) -> Group:
    return channel[1], channel[-1]


def order_calls(state: RankState) -> dict[Group, dict[int, Operation]]:
    """The collectives that a rank has called on each group, by their place: 0 is the first."""
    known = [one for one in state.operations if one.channel[0] in ORDERED]
    called = {channel: count for channel, count in state.counts.items() if channel[0] in ORDERED}
    called |= {one.channel: one.index for one in reversed(known)}  # before the first that is known
    places = Counter[Group]()
    for channel, count in called.items():
        places[group_of(channel)] += count
    orders: dict[Group, dict[int, Operation]] = {}
    for one in known:
        group = group_of(one.channel)
        orders.setdefault(group, {})[places[group]] = one
        places[group] += 1
    return orders


def find_extra(
    orders: Mapping[int, Calls], callers: Collection[int], others: Collection[int], place: int
) -> Extra | None:
    """The fewest calls of the `callers` without which their calls are the same as those of the
    `others`, from a place at or before this one, where both differ. None if there are none, or
    if no later call bears it out."""
    mine, theirs = orders[min(callers)], orders[min(others)]
    first = max(min(mine, default=0), min(theirs, default=0), place - MOST_EXTRA)
    starts = [
        at for at in range(first, place + 1)
        if at in mine and at in theirs and not is_same(mine[at], theirs[at])
    ]  # fmt: skip
    for number in range(1, MOST_EXTRA):
        for start in starts:
            later = [at for at in theirs if at >= start and at + number in mine]
            if later and all(is_same(mine[at + number], theirs[at]) for at in later):
                calls = tuple(mine[at] for at in range(start, start + number))
                return Extra(calls, frozenset(callers), frozenset(others), len(later))
    return None


def is_same(one: Operation, other: Operation) -> bool:
    """Whether both are the same call in the same line."""
    return (one.name, one.tag, one.peer, one.line) == (
        other.name, other.tag, other.peer, other.line,
    )  # fmt: skip
