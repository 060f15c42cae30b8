"""Logical time: every step of a recording takes one unit.

A rank's events follow each other, nothing arrives before it was sent, and no collective is over
before all have come. Every moment is as early as these allow; a transfer and a computation take one
unit, a wait as long as it has to. Source: Lamport: Time, Clocks, and the Ordering of Events in a
Distributed System (1978)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite

import playground.explain.replay.record.recording as record
from playground.explain.replay.analyse.matching import match_collectives, match_messages
from playground.explain.replay.analyse.timeline import ref_of
from playground.explain.replay.record.recording import WAIT, RankRecording, Recording

Edge = tuple[int, int, bool]
"""The beginning of an event, by its rank and number, or, with True, its end."""


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
    for send, receive in match_messages(recording).matched:
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
