"""Which events of different ranks belong together, a send and its receive or the calls of one collective; and the
logical time that follows from it.

In logical time every step of a recording takes one unit. A rank's events follow each other, nothing arrives before it
was sent, and no collective is over before all have come. Every moment is as early as these allow; a transfer and a
computation take one unit, a wait as long as it has to.
Source: Lamport: Time, Clocks, and the Ordering of Events in a Distributed System (1978)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import NamedTuple

from playground.see.analyse.timeline import Edge, in_order, ref_of
from playground.see.record.recording import (
    COLLECTIVE,
    COMPUTE,
    DEVICE,
    MOVE,
    RECEIVE,
    SEND,
    WAIT,
    Event,
    RankRecording,
    Recording,
)


class Key(NamedTuple):
    """What a send and its receive have in common."""

    group: tuple[int, ...]
    sender: int
    receiver: int
    tag: int
    message: int


@dataclass(frozen=True)
class Message:
    """A send and its receive."""

    send: Event
    receive: Event


@dataclass(frozen=True)
class Messages:
    """All messages of a recording."""

    matched: tuple[Message, ...]
    """In the order in which they were sent."""
    unmatched: tuple[Event, ...]
    """Sends without a receive and receives without a send, in the order in which they began."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation, as all ranks that were recorded called it."""

    name: str
    group: tuple[int, ...]
    place: int
    """It is the so-many-th of this name in this group, from 0 on."""
    by_rank: dict[int, Event]
    """A rank that did not come to it, or was gone before, is missing."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the group called it."""
        return set(self.by_rank) == set(self.group)


def match_messages(recording: Recording) -> Messages:
    """Pair every send with its receive."""
    sends: dict[Key, Event] = {}
    receives: dict[Key, Event] = {}
    unmatched: list[Event] = []
    for event in recording.events(SEND, RECEIVE):
        key = key_of(event)
        ends = sends if event.kind == SEND else receives
        if key is None or key in ends:
            unmatched.append(event)
        else:
            ends[key] = event
    matched = [Message(send, receives[key]) for key, send in sends.items() if key in receives]
    unmatched += [send for key, send in sends.items() if key not in receives]
    unmatched += [receive for key, receive in receives.items() if key not in sends]
    return Messages(
        tuple(sorted(matched, key=lambda message: moment(message.send))), tuple(sorted(unmatched, key=moment))
    )


def key_of(event: Event) -> Key | None:
    """What this end of a message shares with its other end; None for a receive from anyone that never ended."""
    if event.peer is None or event.message is None:
        return None
    sender, receiver = (event.rank, event.peer) if event.kind == SEND else (event.peer, event.rank)
    return Key(event.group, sender, receiver, event.tag, event.message)


def match_collectives(recording: Recording) -> list[CollectiveCall]:
    """Pair the calls of all ranks, the k-th of a name in a group with the k-th of it: as all ranks must call the same
    in the same order. In the order in which they began. (What a device does of them is no call.)"""
    return pair_calls(event for event in recording.events(COLLECTIVE) if event.lane != DEVICE)


def pair_calls(events: Iterable[Event]) -> list[CollectiveCall]:
    """The same, of these events of all ranks, each rank's in its order."""
    counts: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Event]] = defaultdict(dict)
    for event in events:
        of_rank = (event.rank, event.name, event.group)
        calls[event.name, event.group, counts[of_rank]][event.rank] = event
        counts[of_rank] += 1
    whole = [CollectiveCall(*key, by_rank) for key, by_rank in calls.items()]
    return sorted(whole, key=lambda call: min(map(moment, call.by_rank.values())))


def moment(event: Event) -> tuple[float, int, int]:
    """When it began; of events that began at once, an order that is always the same."""
    return event.start, event.rank, event.number


def to_logical_time(recording: Recording) -> Recording:
    """The same events with logical times: units in place of seconds."""
    times = logical_times(recording)
    ranks = (replace(rank, events=tuple(retime(rank.events, times))) for rank in recording.ranks)
    return replace(recording, ranks=tuple(ranks))


def logical_times(recording: Recording) -> dict[Edge, float]:
    """When every event begins and ends, in units. What waits for what never came has no time."""
    comes_after = causes(recording)
    edges = {rank.rank: edges_of(rank) for rank in recording.ranks}
    now = dict.fromkeys(edges, 0.0)
    times: dict[Edge, float] = {}
    for edge, rank in in_order(edges, lambda edge: comes_after.get(edge, ())).items():
        if edge in comes_after:
            now[rank] = max(now[rank], 1 + max(times[cause] for cause in comes_after[edge]))
        times[edge] = now[rank]
    return times


def causes(recording: Recording) -> dict[Edge, list[Edge]]:
    """What must come at least a unit before an edge, besides what its own rank does before."""
    found: dict[Edge, list[Edge]] = defaultdict(list)
    for event in recording.events(COMPUTE, MOVE):
        found[ref_of(event), True].append((ref_of(event), False))
    for message in match_messages(recording).matched:
        found[ref_of(message.receive), True].append((ref_of(message.send), False))
    with_messages = {(event.rank, event.parent) for event in recording.events() if event.peer is not None}
    for call in match_collectives(recording):
        refs = [ref_of(event) for event in call.by_rank.values()]
        if with_messages.isdisjoint(refs):
            for ref in refs:
                found[ref, True] += [(each, False) for each in refs]
    return found


def edges_of(rank: RankRecording) -> list[Edge]:
    """A rank's edges in the order of time. What begins comes before what ends at the same time; of what ends, a wait
    comes last, and the rest from the inside out."""
    timed = [(event.start, 0, event.number, (ref_of(event), False)) for event in rank.events]
    timed += [
        (event.end, 2 if event.kind == WAIT else 1, -event.number, (ref_of(event), True))
        for event in rank.events
        if isfinite(event.end)
    ]
    return [edge for *_, edge in sorted(timed)]


def retime(events: Iterable[Event], times: Mapping[Edge, float]) -> Iterable[Event]:
    """These at those times; what has none, since it waits for what never came, is left out."""
    for event in events:
        ref = ref_of(event)
        if (start := times.get((ref, False))) is not None:
            yield replace(event, start=start, end=times.get((ref, True), inf))
