"""Ranks whose operations are carried out by the streams of GPUs, as ranks that stand in them.

On nccl a rank is in no operation: its host has called them all, and waits for a stream. What stands
still is the operation that the stream has come to, and those behind it have not begun, so that they
meet nobody. So the states of ranks are played through: an operation begins when all that it is
behind have ended, and ends when the ranks that it needs have begun theirs. A host that does not
wait may call anything. What has not ended then never will. A rank whose host waits for it is shown
in that operation, and without those behind it: the rest of the judgement is as on gloo.

A batch, as that of `batch_isend_irecv`, ends as one. What has been called before the latest
operations that are known counts as over.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from playground.explain.hang import (
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
from playground.explain.hang.sequences import group_of, order_calls
from playground.explain.hang.wait_graph import find_difference

Place = tuple[int, int]
"""A rank, and the `call` of one of its operations."""
GOES_ON = BACKWARD, BUFFERS
"""What the host of a GPU only calls, and does not wait for."""
WAITS = MAKE_DDP, BUCKETS, "barrier"
"""What the host waits for, to its end."""


def stand_in_streams(states: Sequence[RankState]) -> list[RankState]:
    """The states; those of ranks with a GPU as if the host stood where the streams do."""
    if all(state.gpu == Gpu.NONE for state in states):
        return [*states]
    streams = Streams(states)
    streams.play()
    return [streams.show(state) for state in states]


class Streams:
    """The known operations of all ranks, and which of them have begun and ended."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self.states = {state.rank: state for state in states}
        self.operations: dict[Place, Operation] = {}
        self.batches: dict[Place, list[Place]] = defaultdict(list)
        """The places of the operations of a batch, by the rank and the batch."""
        self.followers: dict[Place, list[Place]] = defaultdict(list)
        """The places of the operations that are behind a batch."""
        self.meetings: dict[tuple[int, Channel, int], Place] = {}
        """Where a rank has called the operation of this channel and index."""
        self.begun: set[Place] = set()
        self.ended: set[Place] = set()
        self.free: set[int] = set()
        """The ranks whose hosts may still call operations."""
        self.positions: dict[Place, int] = {}
        """The places of collectives among those of their group, whatever their functions."""
        self.totals: dict[int, Counter[object]] = {}
        """By rank, the number of collectives that it has called on each group."""
        for state in states:
            self.read(state)

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
        total = self.totals[rank] = Counter()
        for group, calls in order_calls(state).items():
            self.positions |= {(rank, one.call): at for at, one in calls.items()}
            total[group] = max(calls) + 1

    def play(self) -> None:
        """Let begin and end whatever may."""
        while True:
            self.play_operations()
            held = [state for rank, state in self.states.items() if rank not in self.free]
            freed = {state.rank for state in held if self.may_act(state)}
            if not freed:
                return
            self.free |= freed

    def play_operations(self) -> None:
        """Let begin and end what may without further calls."""
        todo = deque(place for place in self.operations if place not in self.ended)
        while todo:
            place = todo.popleft()
            rank, one = place[0], self.operations[place]
            if place not in self.begun and self.may_begin(rank, one):
                self.begun.add(place)
                todo.extend(self.find_counterparts(rank, one))
            if place in self.begun - self.ended and self.may_end(place):
                batch = self.batch_of(place)
                self.ended |= {*self.batches[batch]}
                todo.extend(self.followers[batch])

    def find_counterparts(self, rank: int, one: Operation) -> Iterator[Place]:
        """Where other ranks have called what meets an operation."""
        for other in self.others(rank, one):
            met = self.meetings.get((other, self.channel_for(rank, other, one), one.index))
            if met is not None:
                yield met

    def batch_of(self, place: Place) -> Place:
        """The rank and the batch of an operation: without a GPU, itself."""
        batch = self.operations[place].batch
        return place if batch is None else (place[0], batch)

    def is_over(self, rank: int, batches: Iterable[int]) -> bool:
        """Whether all operations of these batches of a rank have ended."""
        places = (place for batch in batches for place in self.batches.get((rank, batch), ()))
        return self.ended.issuperset(places)

    def may_act(self, state: RankState) -> bool:
        """Whether the host may call further operations."""
        one, rank = state.waits_for, state.rank
        if state.doing == Doing.FINISHED:
            return bool(state.unnamed)
        if state.doing != Doing.IN_OPERATION or one is None or state.unnamed:
            return True
        if one.may_give_up or one.is_elsewhere:
            return True
        if one.kind == HOST:
            return one.name != DESTROY and self.is_over(rank, one.behind)
        if one.batch is None or one.name in WAITS:
            return (rank, one.call) in self.ended
        if one.name in GOES_ON:
            return True
        # a communicator is made, for which the others have to call it, too
        return all(
            self.count(other, self.channel_for(rank, other, one)) > one.index or other in self.free
            for other in self.others(rank, one)
        )

    def may_begin(self, rank: int, one: Operation) -> bool:
        if one.is_open and rank not in self.free:
            return False
        return self.is_over(rank, (each for each in one.behind if each != one.batch))

    def may_end(self, place: Place) -> bool:
        """Whether an operation that has begun ends, with all of its batch."""
        one = self.operations[place]
        if one.kind == HOST or (one.batch is None and one.state == DONE):
            return True
        batch = self.batches[self.batch_of(place)]
        return all(each in self.begun and self.is_met(each) for each in batch)

    def is_met(self, place: Place) -> bool:
        """Whether the ranks that an operation needs have begun theirs, or may."""
        rank, one = place[0], self.operations[place]
        if one.stranger is not None:
            return False
        is_real = self.states[rank].gpu == Gpu.REAL and one.batch is not None
        if is_real and one.kind == SEND:
            return True
        return all(self.is_there(place, other, is_real) for other in self.others(rank, one))

    def is_there(self, place: Place, other: int, is_real: bool) -> bool:
        one, state = self.operations[place], self.states.get(other)
        if state is None or state.unnamed or other in self.free:
            return True
        channel = self.channel_for(place[0], other, one)
        position = self.positions.get(place) if is_real else None
        if position is not None and self.totals[other][group_of(channel)] > position:
            return True
        if self.count(other, channel) <= one.index:
            return False
        met = self.meetings.get((other, channel, one.index))
        if met is None:
            return True
        return met in self.begun and (is_real or not find_difference(one, self.operations[met]))

    def others(self, rank: int, one: Operation) -> Iterator[int]:
        """The ranks that an operation needs."""
        if one.kind == COLLECTIVE:
            yield from {*(one.members or one.group)} - {rank}
        elif one.peer is not None and one.peer != rank:
            yield one.peer

    def channel_for(self, rank: int, other: int, one: Operation) -> Channel:
        """The channel of what another rank calls to meet an operation."""
        if one.kind == COLLECTIVE:
            return one.channel
        return (SEND if one.kind == RECEIVE else RECEIVE), one.group, rank, one.tag, one.number

    def count(self, rank: int, channel: Channel) -> int:
        return self.states[rank].counts.get(channel, 0) if rank in self.states else 0

    def show(self, state: RankState) -> RankState:
        """A rank where its streams stand."""
        rank, one = state.rank, state.waits_for
        known = [each for each in state.operations if each.kind != HOST]
        dropped = [each for each in known if (rank, each.call) not in self.begun]
        counts = Counter(state.counts)
        counts.subtract(each.channel for each in dropped)
        shown = replace(
            state,
            operations=tuple(each for each in known if each not in dropped),
            counts={channel: count for channel, count in counts.items() if channel[0] != HOST},
            unlaunched=tuple(each for each in dropped if each.is_open),
        )
        if one is None or state.doing != Doing.IN_OPERATION:
            return shown
        if rank in self.free:
            is_called = one.kind != HOST and one.name not in GOES_ON
            doing = Doing.IN_OPERATION if is_called else Doing.IN_PROGRAM
            return replace(shown, doing=doing, waits_for=one if is_called else None)
        if one.kind != HOST and one.batch is None:
            return shown
        head = self.find_head(rank, one)
        if head is None:
            doing = Doing.FINISHED if one.name == DESTROY else Doing.IN_OPERATION
            return replace(shown, doing=doing, waits_for=one if one.kind != HOST else None)
        return replace(shown, waits_for=head)

    def find_head(self, rank: int, one: Operation) -> Operation | None:
        """The first operation that has begun, and never ends, of those that one is behind; None if
        there is none."""
        seen: set[Place] = set()
        todo = [*one.behind] if one.batch is None else [one.batch]
        heads = []
        while todo:
            for place in self.batches.get((rank, todo.pop()), ()):
                if place in seen or place in self.ended:
                    continue
                seen.add(place)
                todo += self.operations[place].behind
                if place in self.begun and not self.is_met(place):
                    heads.append(place)
        # at the end of its time the watchdog ends the process, and the program does not go on
        return replace(self.operations[min(heads)], may_give_up=False) if heads else None
