"""Who waits for whom, and which ranks can never go on.

A wait graph has an edge from each rank in an operation to the ranks that the operation lacks. Some
operations need all of them (AND: an all-reduce), some any one (OR: a receive from anyone). Ranks
that may act by themselves release those that wait for them, and so on; ranks that are never
released are in a deadlock, whatever its cause. Those at fault are found by excusing them: if one
rank that did what the others expect of it would release all, it is that one.

**A rank is unknown until everything about its wait has been read.** Only ranks that are known are
blocked, or keep others blocked: an unknown one may act at any time, and what it seems to have
called differently counts for nothing. So no rank is accused because of it; the run goes on to its
timeout, and what is said then begins with "probably" and names what was not known. To be read are:
the call and its place among those of its group, the group's ranks and number, the limits on its
time, that the main thread stands in that call and in nothing that runs inside it, and every other
thread, callback, timer, call and socket of the process. What is read by whom:

| what could make progress                             | who looks at it                           |
|------------------------------------------------------|-------------------------------------------|
| the main thread of a rank that is in no operation    | `Examiner.find_deadlock`, `View.progress` |
| code inside an operation: a backward hook, a handler | `activity.find_visitor`                   |
| other threads, callbacks, timers, calls              | `activity.find_actor`, also of a rank     |
|                                                      | that has returned; threads that only      |
|                                                      | others can wake: `idle`                   |
| processes from elsewhere that form the same world    | `Operation.is_elsewhere`                  |
| an operation that gives up at a limit of its own     | `FlightRecorder.read_group`,              |
|                                                      | `hooks.find_timeout`                      |
| data under way, also of ranks that have come         | `activity.compare`, `diagnosis.find_firm` |
| a rank that is stopped, not seen, or gives no answer | `RankState.moves`, `diagnosis.find_firm`  |
| what an operation is behind in the stream of a GPU,  | `queues`, `streams`: there a rank is      |
| and what its host waits for there                    | shown where its stream stands             |
| calls of other groups, members in another order      | `tap.number_of`,                          |
|                                                      | `Hooks.new_group`                         |
| calls that pass no method that is known, as from C++ | `FlightRecorder.check_groups`,            |
|                                                      | `Hooks.get_backend`                       |
| a group that torch.distributed has not registered    | `FlightRecorder.read_group`               |
| which backward passes average gradients              | `DDPCalls.forward`                        |
| a world that the program forms, with other numbers   | `leave_out_renumbered`                    |
| more calls than are counted                          | `box.FULL`; these four by                 |
|                                                      | `RankState.unnamed`                       |

Source: Hilbrich, de Supinski, Schulz, Müller: A Graph Based Approach for MPI Deadlock Detection
(2009)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from playground.explain.hang.states import (
    BACKWARD,
    COLLECTIVE,
    DONE,
    FORM_WORLD,
    MAKE_DDP,
    NEW_GROUP,
    OF_DDP,
    RECEIVE,
    SEND,
    SPLIT_GROUP,
    Channel,
    Doing,
    Gpu,
    Kind,
    Operation,
    RankState,
)

RENUMBERED = "which rank has which number now"
NEED_ALL = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", FORM_WORLD, NEW_GROUP,
    SPLIT_GROUP, BACKWARD,
)  # fmt: skip
"""Beginnings of the names of collectives that need all ranks."""
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
EQUAL_SHAPES = (
    "all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor",
)  # fmt: skip
TYPED = "all_reduce", "broadcast", "reduce", "all_gather"
"""Beginnings of the names of the collectives of NCCL that have a type."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """The need of an operation."""

    operation: Operation
    absent: frozenset[int]
    """Ranks that have not called their part of it."""
    differing: frozenset[int]
    """Ranks that have called something else in its place."""
    any_one: bool
    """Whether any one of these ranks may release it, not only all."""
    never_ends: bool = False
    """Whether it needs a rank that does not exist."""

    @property
    def missing(self) -> frozenset[int]:
        return self.absent | self.differing

    @property
    def parties(self) -> frozenset[int]:
        """The ranks that it may exchange data with."""
        one = self.operation
        if self.never_ends:
            return frozenset()
        return frozenset(one.group if one.kind == COLLECTIVE or one.peer is None else [one.peer])

    def is_released(self, inert: set[int], excused: set[int]) -> bool:
        """Whether it may end, if all ranks but the `inert` act, and the `excused` did what is
        expected."""
        if self.never_ends:
            return False
        if self.any_one:
            return not self.absent <= inert or self.missing <= excused
        return self.differing <= excused and self.absent.isdisjoint(inert)


class WaitGraph:
    """The states of all ranks, and their dependencies. Whom a broadcast needs depends on its
    algorithm, and which messages receives from anyone took is unknown: an operation that may end
    for all that is known counts as one that ends; if `pessimistic`, it does not.
    """

    def __init__(self, states: Iterable[RankState], pessimistic: bool = False) -> None:
        self.pessimistic = pessimistic
        self.states = {state.rank: state for state in states}
        self.meetings: dict[tuple[Channel, int], dict[int, Operation | None]] = {}
        waiting = [state for state in self.states.values() if state.doing == Doing.IN_OPERATION]
        self.waits = {
            one.rank: self.find_wait(one.rank, one.waits_for) for one in waiting if one.waits_for
        }
        missing = set[int]().union(*(wait.missing for wait in self.waits.values()))
        unseen = missing - self.states.keys()
        self.states |= {
            rank: RankState(rank=rank, doing=Doing.NOT_SEEN, moves=True) for rank in unseen
        }
        ended = self.find_doing(Doing.FINISHED)
        self.finished = {
            rank for rank in ended if not (self.states[rank].may_act or self.states[rank].unnamed)
        }

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
                rank: next(
                    (one for one in list_known(self.states[rank]) if is_at(one, channel, index)),
                    None,
                )
                for rank in operation.group
                if self.count(rank, channel) > index
            }
        return self.meetings[channel, index]

    def find_wait(self, rank: int, operation: Operation) -> Dependency:
        """What this operation lacks, and whom it meets in another operation."""
        if operation.stranger is not None:
            return Dependency(operation, frozenset(), frozenset(), False, never_ends=True)
        others = {*(operation.members or operation.group)} - {rank}
        if operation.members and rank not in operation.members:
            others = set()
        if operation.kind == COLLECTIVE:
            return self.find_wait_in_collective(rank, operation, others)
        return self.find_wait_for_message(rank, operation, others)

    def find_wait_for_message(self, rank: int, message: Operation, others: set[int]) -> Dependency:
        """What a message lacks: its peer's part or, if it is from anyone, that of any other."""
        peer = message.peer
        absent = others if peer is None else {peer}
        if self.is_matched(rank, message):
            absent = set()
        differing = self.find_differing_part(rank, message)
        return Dependency(message, frozenset(absent), frozenset(differing), peer is None)

    def find_wait_in_collective(
        self, rank: int, operation: Operation, others: set[int]
    ) -> Dependency:
        """What a collective lacks: the parts of all others, or of the root, or of any one, as far
        as its name tells."""
        name, peer = operation.name, operation.peer
        met = self.meet(operation)
        any_one = not (
            self.pessimistic
            or self.is_simulated(rank, operation)
            or name.startswith(NEED_ALL)
            or (name in TO_ROOT and peer == rank)
        )
        is_from_root = name in FROM_ROOT or (name == "gather" and peer in met)
        if any_one and is_from_root and peer not in (rank, None):
            others, any_one = others & {peer}, False
        named = {one for one in others & met.keys() if not self.states[one].unnamed}
        differing = {one for one in named if find_difference(operation, met[one])}
        return Dependency(operation, frozenset(others - met.keys()), frozenset(differing), any_one)

    def is_simulated(self, rank: int, operation: Operation) -> bool:
        """Whether the simulated NCCL carries out an operation, which waits there for all ranks, and
        for ever for what does not match."""
        return operation.batch is not None and self.states[rank].gpu == Gpu.SIMULATED

    def find_part(self, rank: int, operation: Operation, other: int) -> Operation | None:
        """What another rank has called to meet an operation of this rank, if it is known."""
        if operation.kind == COLLECTIVE:
            return self.meet(operation).get(other)
        kind = RECEIVE if operation.kind == SEND else SEND
        channel = Channel(kind, operation.group, rank, operation.tag, operation.number)
        known = list_known(self.states[other]) if other in self.states else iter(())
        return next((one for one in known if is_at(one, channel, operation.index)), None)

    def find_differing_part(self, rank: int, message: Operation) -> set[int]:
        """The rank whose part of a message has another size, if that keeps both waiting."""
        peer = message.peer
        if peer is None or not self.is_simulated(rank, message):
            return set()
        part = self.find_part(rank, message, peer)
        return {peer} if find_difference(message, part) else set()

    def is_matched(self, rank: int, message: Operation) -> bool:
        """Whether the other part of a message has been called, or may have been, if receives from
        anyone are about."""
        sending = message.kind == SEND
        group = message.group
        peer = message.peer
        tag = message.tag
        receiver = peer if sending else rank
        anyone = Channel(RECEIVE, group, None, tag, message.number)
        if peer is not None and not (sending and self.pessimistic and self.count(receiver, anyone)):
            other = Channel(RECEIVE if sending else SEND, group, rank, tag, message.number)
            others = (other, anyone) if sending else (other,)
            return self.count(peer, *others) > message.index
        to_receiver = Channel(SEND, group, receiver, tag, message.number)
        sent = sum(self.count(one, to_receiver) for one in group)
        received = self.count(receiver, anyone, *(anyone._replace(peer=one) for one in group))
        if sending:
            return sent <= received
        known = list_known(self.states[rank])
        pending = {
            (one.channel, one.index) for one in known if one.state != DONE and one.kind == RECEIVE
        }
        return sent > received - sum(
            channel._replace(peer=None) == anyone for channel, _ in pending
        )

    def find_blocked(self, held: Iterable[int], excused: set[int]) -> set[int]:
        """The ranks among those that can only wait that are never released."""
        blocked = {*held} - excused
        inert = (blocked | self.finished) - excused
        while released := {
            rank for rank in blocked if self.waits[rank].is_released(inert, excused)
        }:
            blocked -= released
            inert -= released
        return blocked

    def find_culprits(self, held: Iterable[int], blocked: set[int]) -> set[int]:
        """Those without whose fault nobody would be blocked; else those that a majority disagrees
        with. One alone only if what it does alone would release all."""
        # what never ends whatever others do: nobody else is looked at
        if strays := {rank for rank in blocked if self.waits[rank].never_ends}:
            return strays
        # ranks that fail, if all others would go on without their failure
        if (failing := self.find_failing()) and not self.find_blocked(held, failing):
            return failing
        waits = [self.waits[rank] for rank in blocked]
        ended = self.finished & set[int]().union(*(wait.absent for wait in waits))
        differing = set[int]().union(*(wait.differing for wait in waits))
        suspects = blocked | ended | differing
        excusable = {rank for rank in suspects if not self.find_blocked(held, {rank})}
        if ended and have_ended_too_early(ended, waits) and not self.find_blocked(held, ended):
            return ended & excusable or ended
        disputed = [wait.operation for wait in waits if wait.differing]
        first = min(disputed, key=lambda one: one.index, default=None)
        minority = find_minority(self.meet(first)) & suspects if first else set()
        # each of these alone would release all; better those that a majority disagrees with
        if excusable:
            return excusable & minority or excusable
        # nobody alone would: several that a majority disagrees with, or that leave out a new_group
        partial = set[int]().union(
            *(wait.absent for wait in waits if wait.operation.name == NEW_GROUP)
        )
        several = minority or partial & suspects
        return several if len(several) > 1 else blocked | ended

    def find_failing(self) -> set[int]:
        """Ranks that wait in the first operation below an exception, unlike the others: in a
        `finally`. What all do, or one goes on to do, is a way to go on."""
        failing = set()
        for rank, wait in self.waits.items():
            if wait.operation.raised and is_first_below(self.states[rank], wait.operation):
                failing.add(rank)
        return failing if failing < self.waits.keys() | self.finished else set()


def is_first_below(state: RankState, operation: Operation) -> bool:
    """Whether a rank has come out of no other operation below such an exception."""
    done = (one for one in state.operations if one.state == DONE)
    return all(one.raised != operation.raised for one in done)


def have_ended_too_early(ended: set[int], waits: Iterable[Dependency]) -> bool:
    """Whether each wait is for one of these ranks, in a collective, or for others, in a message."""
    return all(bool(wait.absent & ended) == (wait.operation.kind == COLLECTIVE) for wait in waits)


def leave_out_renumbered(states: Sequence[RankState]) -> list[RankState]:
    """The states; where the program has formed worlds itself, those of ranks that have not formed
    the latest, or have another number in it than their launcher's, are left blank: operations of
    others do not name these ranks."""
    worlds = max((state.worlds for state in states), default=0)
    if all(state.worlds == worlds and not state.is_renumbered for state in states):
        return [*states]
    blank = [
        replace(state, waits_for=None, operations=(), counts={}, may_act=RENUMBERED)
        for state in states
    ]
    return [
        replace(one, doing=Doing.IN_PROGRAM) if one.doing == Doing.IN_OPERATION else one
        for one in blank
    ]


def list_known(state: RankState) -> Iterator[Operation]:
    """The operations of a rank that are known, the latest first; one may be there twice."""
    if state.waits_for:
        yield state.waits_for
    yield from reversed(state.operations)


def is_at(operation: Operation, channel: Channel, index: int) -> bool:
    return operation.index == index and operation.channel == channel


def find_difference(one: Operation, other: Operation | None, strictly: bool = False) -> Kind | None:
    """The kind of difference between two calls of a collective, or the parts of a message, that may
    keep it from ending; or, `strictly`, that may make its result wrong. None if there is none."""
    if other is None:
        return None
    if one.kind != COLLECTIVE:
        sizes = {prod(part.shape) * find_width(part.dtype) for part in (one, other)}
        return Kind.SIZES if len(sizes) > 1 else None
    if one.name != other.name:
        is_same = find_algorithm(one.name) == find_algorithm(other.name)
        return None if is_same else tell_apart(one, other)
    if one.name in OF_DDP and one.tag != other.tag and one.tag and other.tag:
        return Kind.MODELS
    # groups of one rank each, made by different ranks, need no other rank
    if one.members != other.members and {len(one.members), len(other.members)} != {1}:
        return Kind.PARTIAL_GROUP
    if one.peer != other.peer:
        return Kind.ROOTS
    if one.name not in OF_DDP and one.tag != other.tag:
        return Kind.OPS
    equal = one.name in EQUAL_SHAPES
    is_flat = 1 in (len(one.shape), len(other.shape))
    same_order = is_flat or without_ones(one.shape) == without_ones(other.shape)
    if equal and (prod(one.shape) != prod(other.shape) or (strictly and not same_order)):
        return Kind.SHAPES
    is_typed = one.batch is not None and one.name.startswith(TYPED)
    widths_differ = equal and find_width(one.dtype) != find_width(other.dtype)
    if one.dtype != other.dtype and (strictly or is_typed or widths_differ):
        return Kind.DTYPES
    return None


def tell_apart(one: Operation, other: Operation) -> Kind:
    """The kind of difference between collectives that are not the same function."""
    names = {one.name, other.name}
    if MAKE_DDP in names:
        return Kind.MODELS
    if names.isdisjoint(OF_DDP):
        return Kind.COLLECTIVES
    return Kind.SKIPPED if names <= {*OF_DDP} else Kind.BESIDE_DDP


def without_ones(shape: Sequence[int]) -> list[int]:
    """Dimensions that matter for the order of the elements: (2, 3) and (2, 1, 3) have the same."""
    return [length for length in shape if length != 1]


def find_algorithm(name: str) -> str:
    """The collective that a function does: all_gather_into_tensor does what all_gather does, and
    meets it."""
    return re.sub("(_into)?_tensor$|_single$", "", name)


def find_width(dtype: str) -> int:
    """Bytes of an element; 1 if it is not known."""
    bits = re.search("[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def find_minority(calls: Mapping[int, Operation | None], strictly: bool = False) -> set[int]:
    """The ranks whose calls differ from those of most; all, if there is no majority."""
    known = {rank: one for rank, one in calls.items() if one}
    votes = {
        rank: sum(not find_difference(one, other, strictly) for other in known.values())
        for rank, one in known.items()
    }
    most = max(votes.values())
    winners = {rank for rank, number in votes.items() if number == most}
    return known.keys() - winners if len(winners) == most else set(known)
