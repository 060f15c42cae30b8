"""Look-ups in a recording: events by number, by time, by the event around them; which events of
different ranks belong together, a send and its receive or the calls of one collective; and the
logical time that follows from it.

In logical time every step of a recording takes one unit. A rank's events follow each other, nothing
arrives before it was sent, and no collective is over before all have come. Every moment is as early
as these allow; a transfer and a computation take one unit, a wait as long as it has to. Source:
Lamport: Time, Clocks, and the Ordering of Events in a Distributed System (1978)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from math import inf, isfinite
from typing import NamedTuple

import playground.explain.replay.record as record
from playground.explain.replay.record import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    VALUES,
    WAIT,
    Event,
    RankRecording,
    Recording,
)

BLOCKING = (SEND, RECEIVE, COLLECTIVE)
"""Kinds whose call itself waits until it is done, unless a `wait()` follows."""
POSTS = ("isend", "irecv")
"""Calls that never wait."""
Ref = tuple[int, int]
"""An event: its rank, and its number there."""
Edge = tuple[int, int, bool]
"""The beginning of an event, by its rank and number, or, with True, its end."""
Lane = tuple[int, str]
"""A rank and a lane of it."""
Interval = tuple[float, float]


class Timeline:
    """The events of a recording, by rank and number, and by lane."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.by_ref: dict[Ref, Event] = {ref_of(event): event for event in recording.events()}
        self.lanes: dict[Lane, list[Event]] = defaultdict(list)
        self.waited_for: set[Ref] = set()
        self.ahead = {rank.rank for rank in recording.ranks if rank.runs_ahead}
        """Ranks whose calls and waits are over before their GPU is."""
        for event in recording.events():
            self.lanes[event.rank, event.lane].append(event)
            self.waited_for |= {(event.rank, number) for number in event.awaits}
        for lane in self.lanes.values():
            lane.sort(key=lambda event: (event.start, event.number))

    def awaited(self, wait: Event) -> list[Event]:
        """The events that a wait waits for; a call that blocks waits for itself."""
        if wait.kind != WAIT:
            return [wait]
        refs = ((wait.rank, number) for number in wait.awaits)
        return [self.by_ref[ref] for ref in refs if ref in self.by_ref]

    def waits(self) -> Iterator[Event]:
        """The `wait()`s that ended, and the calls that blocked until they were done; the innermost
        ones only.

        Events that neither ended nor were waited for are no waits: their duration is unknown. Ranks
        that run ahead of their GPU have none: their waits end when the work is issued.
        """
        waiting = {
            ref_of(event)
            for (rank, _), lane in self.lanes.items()
            if rank not in self.ahead
            for place, event in enumerate(lane)
            if (event.kind == WAIT and isfinite(event.end)) or self.blocks(event, lane, place)
        }
        innermost = waiting - {outer for ref in waiting for outer in self.around(ref)}
        return (event for ref, event in self.by_ref.items() if ref in innermost)

    def around(self, ref: Ref) -> Iterator[Ref]:
        """The events around this one, from the innermost on."""
        event: Event | None = self.by_ref[ref]
        while event is not None and event.parent is not None:
            yield (outer := (event.rank, event.parent))
            event = self.by_ref.get(outer)

    def blocks(self, event: Event, lane: Sequence[Event], place: int) -> bool:
        """Whether the rank stands still in this call, `lane[place]`, until it is done.

        It does not if a wait for it follows, or if the lane continues before it is done.
        """
        ref = ref_of(event)
        if event.kind not in BLOCKING or event.name in POSTS:
            return False
        if not isfinite(event.end) or ref in self.waited_for:
            return False
        following = (lane[next_one] for next_one in range(place + 1, len(lane)))
        later = takewhile(lambda other: other.start < event.end, following)
        return all(ref in self.around(ref_of(other)) for other in later)


class Lookup:
    """Events by time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.start, event.number))
        self.starts = [event.start for event in self.events]
        self.ends = [*accumulate((event.end for event in self.events), max)]
        """The times at which all events up to each one were over."""

    def during(self, start: float, end: float) -> Sequence[Event]:
        """The events that overlap the time from `start` to `end`."""
        near = self.events[bisect_right(self.ends, start) : bisect_left(self.starts, end)]
        return [event for event in near if event.end > start]

    def after(self, time: float) -> Event | None:
        """The first event that began then or later."""
        place = bisect_left(self.starts, time)
        return self.events[place] if place < len(self.events) else None


def ref_of(event: Event) -> Ref:
    return event.rank, event.number


def covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """The seconds between `start` and `end` that these intervals cover, each of them counted
    once."""
    seconds = 0.0
    for first, last in sorted(intervals):
        begin, until = max(start, first), min(last, end)
        if begin < until:
            seconds += until - begin
            start = until
    return seconds


class MatchedMessage(NamedTuple):
    """A send and its receive."""

    send: Event
    receive: Event


def match_messages(recording: Recording) -> tuple[list[MatchedMessage], list[Event]]:
    """Pair every send with its receive. Returns the messages in the order in which they were sent;
    and sends without a receive and receives without a send, in the order in which they began."""
    ends: dict[str, dict[object, Event]] = {SEND: {}, RECEIVE: {}}
    unmatched: list[Event] = []
    for event in recording.events(SEND, RECEIVE):
        way = (event.rank, event.peer) if event.kind == SEND else (event.peer, event.rank)
        key = event.group, way, event.tag, event.message
        # None: from anyone, and never ended
        if event.message is None or event.peer is None or key in ends[event.kind]:
            unmatched.append(event)
        else:
            ends[event.kind][key] = event
    sends, receives = ends.values()
    matched = [
        MatchedMessage(send, receives[key]) for key, send in sends.items() if key in receives
    ]
    unmatched += [
        event for key, event in (sends | receives).items() if not (key in sends and key in receives)
    ]
    return sorted(matched, key=lambda message: moment(message.send)), sorted(unmatched, key=moment)


def match_collectives(recording: Recording, kind: str = COLLECTIVE) -> list[dict[int, Event]]:
    """Pair the calls of all ranks, the k-th of a name in a group with the k-th of it: all ranks
    must call the same in the same order. In the order in which they began, each the calls by
    rank. `kind`: `COLLECTIVE`, or `BUCKET` for the all-reduces within DDP's backward."""
    counts: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Event]] = defaultdict(dict)
    for event in recording.events(kind):
        of_rank = (event.rank, event.name, event.group)
        calls[event.name, event.group, counts[of_rank]][event.rank] = event
        counts[of_rank] += 1
    return sorted(calls.values(), key=lambda call: min(map(moment, call.values())))


def moment(event: Event) -> tuple[float, int, int]:
    """A sort key: the start of an event, with ties in a fixed order."""
    return event.start, event.rank, event.number


Vector = tuple[float, ...]


class HeldValues(NamedTuple):
    """From the start, or from the end, of this event on, the rank holds these values."""

    event: Event
    at_end: bool
    values: Vector

    @property
    def time(self) -> float:
        return self.event.end if self.at_end else self.event.start


def holdings_of(rank: RankRecording) -> Iterator[HeldValues]:
    """The contents of this rank's tensors, in the order of time.

    They are derived from recorded values alone. `VALUES` and the end of a collective have a whole
    tensor. Inside a collective, a chunk of it is known where it is sent or has been computed. (A
    received chunk may be kept or added to another: it shows when that is sent on.)
    """
    around = {event.number for event in rank.events if event.kind == COLLECTIVE}
    parts: set[int] = set()
    """The numbers of events that concern a chunk of a collective's tensor."""
    for event in rank.events:
        if event.parent in around:
            around.add(event.number)
            if event.kind not in (COLLECTIVE, VALUES):
                parts.add(event.number)
    known = [
        HeldValues(event, event.kind != SEND, event.values)  # what is sent was there before
        for event in rank.events
        if event.values is not None and (event.kind == SEND or isfinite(event.end))
    ]
    # Of several at the same moment, a collective comes last: it ends around its messages.
    known.sort(key=lambda each: (each.time, each.event.kind == COLLECTIVE, each.event.number))
    held: Vector = ()
    for event, at_end, values in known:
        if event.number in parts:
            if (
                event.kind == RECEIVE
                or event.offset is None
                or event.offset + len(values) > len(held)
            ):
                continue
            values = (*held[: event.offset], *values, *held[event.offset + len(values) :])
        if values != held:
            held = values
            yield HeldValues(event, at_end, held)


def to_logical_time(recording: Recording) -> Recording:
    """The recording with units in place of seconds. Events that wait for what never came are left
    out."""
    times = logical_times(recording)

    def retime(rank: RankRecording) -> RankRecording:
        events = (
            replace(event, start=times[begin], end=times.get((*ref_of(event), True), inf))
            for event in rank.events
            if (begin := (*ref_of(event), False)) in times
        )
        return replace(rank, events=tuple(events))

    return replace(recording, ranks=tuple(map(retime, recording.ranks)))


def logical_times(recording: Recording) -> dict[Edge, float]:
    """The start and end of every event, in units. Those that wait for what never came have none."""
    comes_after = causes(recording)
    times: dict[Edge, float] = {}
    waiting: dict[Edge, list[Iterator[Edge]]] = defaultdict(list)

    def follow(rank: RankRecording) -> Iterator[Edge]:
        """Set the times of a rank's edges in order. Yields every edge that has to come before that
        is known."""
        now = 0.0
        for edge in edges_of(rank):
            for cause in comes_after.get(edge, ()):
                if cause not in times:
                    yield cause
                now = max(now, 1 + times[cause])
            times[edge] = now
            if edge in waiting:
                ready.extend(waiting.pop(edge))

    ready = [follow(rank) for rank in recording.ranks]
    while ready:
        walk = ready.pop()
        for cause in walk:
            waiting[cause].append(walk)
            break
    return times


def causes(recording: Recording) -> dict[Edge, list[Edge]]:
    """The edges that must come at least a unit before an edge, besides those before it on its own
    rank."""
    found: dict[Edge, list[Edge]] = defaultdict(list)
    for event in recording.events(record.COMPUTE, record.MOVE):
        found[event.rank, event.number, True].append((event.rank, event.number, False))
    for send, receive in match_messages(recording)[0]:
        found[receive.rank, receive.number, True].append((send.rank, send.number, False))
    with_messages = {
        (event.rank, event.parent) for event in recording.events() if event.peer is not None
    }
    for call in match_collectives(recording) + match_collectives(recording, record.BUCKET):
        refs = [ref_of(event) for event in call.values()]
        if with_messages.isdisjoint(refs):
            for ref in refs:
                found[*ref, True] += [(*each, False) for each in refs]
    return found


def edges_of(rank: RankRecording) -> list[Edge]:
    """A rank's edges in the order of time. At the same time, starts come before ends, and ends from
    the inside out, with waits last."""
    timed = []
    for event in rank.events:
        timed.append((event.start, 0, event.number, False))
        if isfinite(event.end):
            timed.append((event.end, 2 if event.kind == WAIT else 1, -event.number, True))
    return [(rank.rank, abs(number), is_end) for _, _, number, is_end in sorted(timed)]
