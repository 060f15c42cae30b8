"""Ranks whose operations are carried out by the streams of GPUs, as ranks that stand in them.

On nccl a rank is in no operation: its host has called them all, and waits for a stream. What stands
still is the operation that the stream has come to, and those behind it have not begun, so that they
meet nobody. So the calls of all ranks are played through: an operation begins when all that it is
behind have ended, and ends when the ranks that it needs have begun theirs. A rank whose host waits
for one that has not ended is shown in that, and without those behind it: the rest of the judgement
is as on gloo.

A batch, as that of `batch_isend_irecv`, ends as one. What has been called before the latest
operations that are known counts as over.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from playground.base.event_log import NONE
from playground.explain.hang.differences import Group, group_of, order_calls
from playground.explain.hang.states import (
    BACKWARD,
    BUCKETS,
    BUFFERS,
    COLLECTIVE,
    DESTROY,
    DONE,
    HOST,
    MAKE_DDP,
    RECEIVE,
    SEND,
    Channel,
    Doing,
    Gpu,
    Operation,
    RankState,
)
from playground.explain.hang.wait_graph import find_difference

Place = tuple[int, int]
"""A rank, and the `call` of one of its operations."""
Meeting = tuple[int, Channel, int]
"""A rank, a channel, and an index."""
GOES_ON = BACKWARD, BUFFERS
"""What the host of a GPU only calls, and does not wait for."""
WAITS = MAKE_DDP, BUCKETS, "barrier"
"""What the host waits for, to its end."""


def stand_in_streams(states: Sequence[RankState]) -> list[RankState]:
    """The states; those of ranks with a GPU as if the host stood where the streams do."""
    if all(state.gpu == Gpu.NONE for state in states):
        return [*states]
    streams = Streams(states)
    return [streams.show(state) for state in states]


def suppose_wait(state: RankState, batches: Iterable[int] | None = None) -> RankState:
    """A rank whose host, in the program, waits for these batches of its simulated GPU; None: for
    all that it has called."""
    if state.gpu != Gpu.SIMULATED or state.doing != Doing.IN_PROGRAM:
        return state
    if batches is None:
        batches = (one.batch for one in state.operations if one.batch is not None)
    wait = Operation(kind=HOST, name=HOST, index=0, group=(), call=-1, behind=tuple(batches))
    return replace(state, doing=Doing.IN_OPERATION, waits_for=wait)


class Streams:
    """The known operations of all ranks, and which of them have begun and ended by now."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self.states = {state.rank: state for state in states}
        self.operations: dict[Place, Operation] = {}
        self.batches: dict[Place, list[Place]] = defaultdict(list)
        """The places of the operations of a batch, by the rank and the batch."""
        self.followers: dict[Place, list[Place]] = defaultdict(list)
        """The places of the operations that are behind a batch."""
        self.meetings: dict[Meeting, Place] = {}
        """Where a rank has called the operation of this channel and index."""
        self.begun: set[Place] = set()
        self.ended: set[Place] = set()
        self.positions: dict[Place, int] = {}
        """The place of a collective among those of its group, whatever their functions."""
        self.ordered: dict[tuple[int, Group, int], Place] = {}
        """Where a rank has called the collective of a group in this place."""
        self.totals: dict[tuple[int, Group], int] = {}
        """The number of collectives that a rank has called on a group."""
        self.awaited_calls = {
            (state.waits_for.channel, state.waits_for.index)
            for state in states
            if state.waits_for and is_in_call(state.waits_for)
        }
        """What hosts are still calling: they make a communicator."""
        for state in states:
            self.read(state)
        self.play()

    def read(self, state: RankState) -> None:
        rank = state.rank
        known = {one.call: one for one in (*state.operations, *filter(None, [state.waits_for]))}
        for call, one in sorted(known.items()):
            place = rank, call
            self.operations[place] = one
            self.batches[self.batch_of(place)].append(place)
            for batch in one.behind:
                self.followers[rank, batch].append(place)
            self.meetings[rank, one.channel, one.index] = place
        for group, calls in order_calls(state).items():
            self.totals[rank, group] = max(calls) + 1
            for position, one in calls.items():
                self.positions[rank, one.call] = position
                self.ordered[rank, group, position] = rank, one.call

    def play(self) -> None:
        """Let begin and end whatever does, by what has been called."""
        todo = deque(self.operations)
        while todo:
            place = todo.popleft()
            if place not in self.begun and self.begins(place):
                self.begun.add(place)
                todo.extend(self.find_counterparts(place))
            if place in self.begun and place not in self.ended and self.ends(place):
                batch = self.batch_of(place)
                self.ended |= {*self.batches[batch]}
                todo.extend(self.followers[batch])

    def batch_of(self, place: Place) -> Place:
        """The rank and the batch of an operation: without a GPU, itself."""
        rank, _ = place
        batch = self.operations[place].batch
        return place if batch is None else (rank, batch)

    def find_counterparts(self, place: Place) -> Iterator[Place]:
        """Where other ranks have called what may meet an operation."""
        (rank, _), one = place, self.operations[place]
        for other in find_others(rank, one):
            met = self.meetings.get((other, channel_for(rank, one), one.index))
            ordered = self.ordered.get(
                (other, group_of(one.channel), self.positions.get(place, NONE))
            )
            yield from {*filter(None, (met, ordered))}

    def begins(self, place: Place) -> bool:
        """Whether all that an operation is behind has ended."""
        (rank, _), one = place, self.operations[place]
        batches = (self.batches.get((rank, each), ()) for each in one.behind if each != one.batch)
        return not one.is_open and all(self.ended.issuperset(batch) for batch in batches)

    def ends(self, place: Place) -> bool:
        """Whether an operation that has begun ends, with all of its batch."""
        one = self.operations[place]
        if one.kind == HOST or (one.batch is None and one.state == DONE):
            return True
        batch = self.batches[self.batch_of(place)]
        return all(each in self.begun and self.is_met(each) for each in batch)

    def is_met(self, place: Place) -> bool:
        """Whether the ranks that an operation needs have begun theirs."""
        (rank, _), one = place, self.operations[place]
        is_real = self.states[rank].gpu == Gpu.REAL and one.batch is not None
        if one.stranger is not None:
            return False
        if is_real and one.kind == SEND:
            return True
        return all(self.is_there(place, other, is_real) for other in find_others(rank, one))

    def is_there(self, place: Place, other: int, is_real: bool) -> bool:
        """Whether another rank has begun what meets an operation, as far as is known."""
        (rank, _), one, state = place, self.operations[place], self.states.get(other)
        if state is None or state.unnamed:
            return True
        position = self.positions.get(place)
        if is_real and position is not None:
            group = group_of(one.channel)
            met = self.ordered.get((other, group, position))
            is_called = self.totals.get((other, group), 0) > position
        else:
            channel = channel_for(rank, one)
            met = self.meetings.get((other, channel, one.index))
            is_called = state.counts.get(channel, 0) > one.index
        if met is None:
            return is_called
        differs = not is_real and find_difference(one, self.operations[met])
        return met in self.begun and not differs

    def show(self, state: RankState) -> RankState:
        """A rank where its streams stand."""
        shown = self.drop_unbegun(state)
        one = state.waits_for
        if one is None or state.doing != Doing.IN_OPERATION:
            return shown
        if one.batch is None and one.kind != HOST:  # as of gloo
            return shown
        if is_in_call(one):
            others = [self.states.get(other) for other in one.group if other != state.rank]
            are_called = (each and each.counts.get(one.channel, 0) > one.index for each in others)
            return (
                replace(shown, doing=Doing.IN_PROGRAM, waits_for=None) if all(are_called) else shown
            )
        head = None if one.name in GOES_ON else self.find_head(state.rank, one)
        if head:
            return replace(shown, waits_for=head)
        doing = Doing.FINISHED if one.name == DESTROY else Doing.IN_PROGRAM
        return replace(shown, doing=doing, waits_for=None)

    def drop_unbegun(self, state: RankState) -> RankState:
        """A rank without the operations that its streams have not come to: it counts as one that
        has not called them."""
        known = [each for each in state.operations if each.kind != HOST]
        dropped = [
            each
            for each in known
            if (state.rank, each.call) not in self.begun
            and (each.channel, each.index) not in self.awaited_calls
        ]
        counts = Counter(state.counts)
        counts.subtract(each.channel for each in dropped)
        return replace(
            state,
            operations=tuple(each for each in known if each not in dropped),
            counts={channel: count for channel, count in counts.items() if channel.kind != HOST},
            unlaunched=tuple(each for each in dropped if each.is_open),
        )

    def find_head(self, rank: int, one: Operation) -> Operation | None:
        """The first operation that has begun and not ended, of those that the host waits for in
        this one; None if there is none."""
        seen: set[Place] = set()
        heads = set()
        todo = [*one.behind] if one.batch is None else [one.batch]
        while todo:
            for place in self.batches.get((rank, todo.pop()), ()):
                if place in seen or place in self.ended:
                    continue
                seen.add(place)
                todo += self.operations[place].behind
                if place in self.begun and not self.is_met(place):
                    heads.add(place)
        # at the end of its time the watchdog ends the process, and the program does not go on
        return replace(self.operations[min(heads)], may_give_up=False) if heads else None


def is_in_call(one: Operation) -> bool:
    """Whether a host in this operation is still calling it, for a communicator that is made, and
    does not wait for its end."""
    return one.batch is not None and one.name not in (*GOES_ON, *WAITS)


def find_others(rank: int, one: Operation) -> Iterator[int]:
    """The ranks that an operation needs."""
    if one.kind == COLLECTIVE:
        yield from {*(one.members or one.group)} - {rank}
    elif one.kind != HOST and one.peer is not None and one.peer != rank:
        yield one.peer


def channel_for(rank: int, one: Operation) -> Channel:
    """The channel of what another rank calls to meet an operation of this one."""
    if one.kind == COLLECTIVE:
        return one.channel
    kind = SEND if one.kind == RECEIVE else RECEIVE
    return Channel(kind, one.group, rank, one.tag, one.number)
