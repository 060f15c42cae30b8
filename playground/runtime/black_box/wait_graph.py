"""Who waits for whom, and which ranks can never go on.

A wait graph has an edge from each rank in an operation to the ranks that the operation lacks. Some operations need all
of them (AND: an all-reduce), some any one (OR: a receive from anyone). Ranks that may act by themselves release those
that wait for them, and so on; ranks that are never released are in a deadlock, whatever its cause. Those at fault are
found by excusing them: if one rank that did what the others expect of it would release all, it is that one.

Source: Hilbrich, de Supinski, Schulz, Müller: A Graph Based Approach for MPI Deadlock Detection (2009)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from playground.runtime.black_box import (
    BACKWARD,
    COLLECTIVE,
    DONE,
    FINISHED,
    IN_OPERATION,
    NEW_GROUP,
    RECEIVE,
    SEND,
    Channel,
    Operation,
    RankState,
)

NOT_SEEN = "not seen"
"""What a rank does of which no state is given, as on another host."""
COLLECTIVES, ROOTS, SHAPES = "different collectives", "different roots", "different shapes"
DTYPES, SIZES, PARTIAL_GROUP = "different dtypes", "different sizes", "a group not made by all"
"""Kinds of differences, the last one of messages."""
NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", NEW_GROUP, BACKWARD)
"""What names of collectives begin with that need all ranks."""
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


@dataclass(frozen=True, slots=True)
class Wait:
    """What an operation lacks."""

    operation: Operation
    absent: frozenset[int]
    """Ranks that have not called their part of it."""
    differing: frozenset[int]
    """Ranks that have called something else in its place."""
    any_one: bool
    """Whether any one of these ranks may release it, not only all."""

    @property
    def missing(self) -> frozenset[int]:
        return self.absent | self.differing

    def is_released(self, inert: set[int], excused: set[int]) -> bool:
        """Whether it may end, if all ranks but the `inert` act, and the `excused` did what is expected."""
        if self.any_one:
            return not self.absent <= inert or self.missing <= excused
        return self.differing <= excused and self.absent.isdisjoint(inert)


class WaitGraph:
    """What all ranks do, and what they wait for. Whom a broadcast needs depends on its algorithm, and which messages
    receives from anyone took is unknown: an operation that may end for all that is known counts as one that ends; if
    `pessimistic`, it does not.
    """

    def __init__(self, states: Iterable[RankState], pessimistic: bool = False) -> None:
        self.pessimistic = pessimistic
        self.states = {state.rank: state for state in states}
        self.meetings: dict[tuple[Channel, int], dict[int, Operation | None]] = {}
        waiting = [state for state in self.states.values() if state.doing == IN_OPERATION]
        self.waits = {one.rank: self.find_wait(one.rank, one.waits_for) for one in waiting if one.waits_for}
        missing = set[int]().union(*(wait.missing for wait in self.waits.values()))
        self.states |= {rank: RankState(rank=rank, doing=NOT_SEEN) for rank in missing - self.states.keys()}
        self.finished = self.find_doing(FINISHED)

    def find_doing(self, doing: str) -> set[int]:
        return {rank for rank, state in self.states.items() if state.doing == doing}

    def count(self, rank: int | None, *channels: Channel) -> int:
        state = None if rank is None else self.states.get(rank)
        return sum(state.counts.get(channel, 0) for channel in channels) if state else 0

    def meet(self, operation: Operation) -> dict[int, Operation | None]:
        """The calls of a collective, by rank; None where it is not known any more."""
        channel, index = operation.channel, operation.index
        if (channel, index) not in self.meetings:
            self.meetings[channel, index] = {
                rank: next((one for one in list_known(self.states[rank]) if is_at(one, channel, index)), None)
                for rank in operation.group
                if self.count(rank, channel) > index
            }
        return self.meetings[channel, index]

    def find_wait(self, rank: int, operation: Operation) -> Wait:
        name, peer, others = operation.name, operation.peer, {*operation.group} - {rank}
        if operation.kind != COLLECTIVE:
            absent = set() if self.is_matched(rank, operation) else others if peer is None else {peer}
            return Wait(operation, frozenset(absent), frozenset(), peer is None)
        met = self.meet(operation)
        any_one = not (self.pessimistic or name.startswith(NEED_ALL) or (name in TO_ROOT and peer == rank))
        if any_one and peer not in (rank, None) and (name in FROM_ROOT or (name == "gather" and peer in met)):
            others, any_one = others & {peer}, False
        differing = {one for one in others & met.keys() if find_difference(operation, met[one])}
        return Wait(operation, frozenset(others - met.keys()), frozenset(differing), any_one)

    def is_matched(self, rank: int, message: Operation) -> bool:
        """Whether the other part of a message has been called, or may have been, if receives from anyone are about."""
        sending, group, peer, tag = message.kind == SEND, message.group, message.peer, message.tag
        receiver = peer if sending else rank
        anyone: Channel = (RECEIVE, group, None, tag)
        if peer is not None and not (sending and self.pessimistic and self.count(receiver, anyone)):
            other: Channel = (RECEIVE if sending else SEND, group, rank, tag)
            return self.count(peer, other, *[anyone] * sending) > message.index
        sent = sum(self.count(one, (SEND, group, receiver, tag)) for one in group)
        received = self.count(receiver, anyone, *((RECEIVE, group, one, tag) for one in group))
        if sending:
            return sent <= received
        known = list_known(self.states[rank])
        pending = {(one.channel, one.index) for one in known if one.state != DONE and one.kind == RECEIVE}
        return sent > received - sum((channel[1], channel[3]) == (group, tag) for channel, _ in pending)

    def find_blocked(self, held: Iterable[int], excused: set[int]) -> set[int]:
        """The ranks among those that can only wait that are never released."""
        blocked = {*held} - excused
        inert = (blocked | self.finished) - excused
        while released := {rank for rank in blocked if self.waits[rank].is_released(inert, excused)}:
            blocked -= released
            inert -= released
        return blocked

    def find_culprits(self, held: Iterable[int], blocked: set[int]) -> set[int]:
        """Those without whose fault nobody would be blocked; else those that a majority disagrees with."""
        waits = [self.waits[rank] for rank in blocked]
        ended = self.finished & set[int]().union(*(wait.absent for wait in waits))
        differing = set[int]().union(*(wait.differing for wait in waits))
        if failing := {rank for rank in blocked if self.waits[rank].operation.raised}:
            return failing
        suspects = blocked | ended | differing
        excusable = {rank for rank in suspects if not self.find_blocked(held, {rank})}
        unequal = all(bool(wait.absent & ended) == (wait.operation.kind == COLLECTIVE) for wait in waits)
        if ended and unequal and not self.find_blocked(held, ended):  # in collectives, they ended too early
            return ended & excusable or ended
        first = min((wait.operation for wait in waits if wait.differing), key=lambda one: one.index, default=None)
        minority = find_minority(self.meet(first)) & suspects if first else set()
        partial = set[int]().union(*(wait.absent for wait in waits if wait.operation.name == NEW_GROUP))
        return excusable & minority or excusable or minority or partial & suspects or blocked | ended


def list_known(state: RankState) -> Iterator[Operation]:
    """The operations of a rank that are known, the latest first; one may be there twice."""
    if state.waits_for:
        yield state.waits_for
    yield from reversed(state.operations)


def is_at(operation: Operation, channel: Channel, index: int) -> bool:
    return operation.index == index and operation.channel == channel


def find_difference(one: Operation, other: Operation | None, strictly: bool = False) -> str:
    """The kind of difference between two calls of a collective, or the parts of a message, that may keep it from
    ending; or, `strictly`, that may make its result wrong. Empty if there is none."""
    if other is None:
        return ""
    if one.kind != COLLECTIVE:
        sizes = {prod(part.shape) * find_width(part.dtype) for part in (one, other)}
        return SIZES if len(sizes) > 1 else ""
    if one.name != other.name:
        return "" if find_algorithm(one.name) == find_algorithm(other.name) else COLLECTIVES
    if one.name == NEW_GROUP and one.shape != other.shape:  # the members
        return PARTIAL_GROUP
    if one.peer != other.peer:
        return ROOTS
    equal = one.name in EQUAL_SHAPES
    same_order = one.shape == other.shape or 1 in (len(one.shape), len(other.shape))  # flat tensors meet others
    if equal and (prod(one.shape) != prod(other.shape) or (strictly and not same_order)):
        return SHAPES
    if one.dtype != other.dtype and (strictly or (equal and find_width(one.dtype) != find_width(other.dtype))):
        return DTYPES
    return ""


def find_algorithm(name: str) -> str:
    """The collective that a function does: all_gather_into_tensor does what all_gather does, and meets it."""
    return re.sub("(_into)?_tensor$|_single$", "", name)


def find_width(dtype: str) -> int:
    """Bytes of an element; 1 if it is not known."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def find_minority(calls: Mapping[int, Operation | None], strictly: bool = False) -> set[int]:
    """The ranks whose calls differ from those of most; all, if there is no majority."""
    known = {rank: one for rank, one in calls.items() if one}
    votes = {
        rank: sum(not find_difference(one, other, strictly) for other in known.values()) for rank, one in known.items()
    }
    most = max(votes.values())
    winners = {rank for rank, number in votes.items() if number == most}
    return known.keys() - winners if len(winners) == most else set(known)
