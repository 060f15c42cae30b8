"""Logical time: a recording as if every step of it took one unit. What follows from what is seen, and nothing else.

A rank's events follow each other, nothing arrives before it was sent, and no collective is over before all have come.
Every moment is as early as these allow; a transfer and a computation take one unit, a wait as long as it has to.
Source: Lamport: Time, Clocks, and the Ordering of Events in a Distributed System (1978)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite

from playground.see.analyse.matching import match_collectives, match_messages
from playground.see.analyse.order import in_order
from playground.see.analyse.timeline import Edge, ref_of
from playground.see.record.recording import COMPUTE, MOVE, WAIT, Event, RankRecording, Recording


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
