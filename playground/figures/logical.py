"""Logical time: a recording as if every step of it took one unit. What follows from what is seen, and nothing else.

A rank's events follow each other, nothing arrives before it was sent, and no collective is over before all have come.
Every moment is as early as these allow; a transfer and a computation take one unit, a wait as long as it has to.
Source: Lamport: Time, Clocks, and the Ordering of Events in a Distributed System (1978)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

from playground.analysis.matching import match_collectives, match_messages
from playground.analysis.timeline import Ref, ref_of
from playground.recording.recording import COMPUTE, WAIT, Event, RankRecording, Recording


@dataclass(frozen=True)
class Moment:
    """A beginning or an end of an event."""

    ref: Ref
    is_end: bool


def to_logical_time(recording: Recording) -> Recording:
    """The same events with logical times: units in place of seconds."""
    comes_after = causes(recording)
    times: dict[Moment, float] = {}
    left = {rank.rank: moments_of(rank) for rank in recording.ranks}
    now: dict[int, float] = defaultdict(float)
    moved = True
    while moved:
        moved = False
        for rank, moments in left.items():
            while moments and all(cause in times for cause in comes_after[moments[-1]]):
                moment = moments.pop()
                now[rank] = max([now[rank], *(times[cause] + 1 for cause in comes_after[moment])])
                times[moment] = now[rank]
                moved = True
    ranks = (replace(rank, events=tuple(retime(rank.events, times))) for rank in recording.ranks)
    return replace(recording, ranks=tuple(ranks))


def causes(recording: Recording) -> dict[Moment, list[Moment]]:
    """What must come at least a unit before a moment, besides what its own rank does before."""
    found: dict[Moment, list[Moment]] = defaultdict(list)
    for event in recording.events(COMPUTE):
        found[Moment(ref_of(event), True)].append(Moment(ref_of(event), False))
    for message in match_messages(recording).matched:
        found[Moment(ref_of(message.receive), True)].append(Moment(ref_of(message.send), False))
    with_messages = {(event.rank, event.parent) for event in recording.events() if event.peer is not None}
    for call in match_collectives(recording):
        if not any(ref_of(event) in with_messages for event in call.by_rank.values()):
            for event in call.by_rank.values():
                found[Moment(ref_of(event), True)] += [Moment(ref_of(each), False) for each in call.by_rank.values()]
    return found


def moments_of(rank: RankRecording) -> list[Moment]:
    """A rank's moments, the last first."""
    timed = [(event.start, 0, event.number, Moment(ref_of(event), False)) for event in rank.events]
    for event in rank.events:
        if isfinite(event.end):
            # Of what ends at the same time: what was waited for, then the wait; otherwise from the inside out.
            order = 2 if event.kind == WAIT else 1
            timed.append((event.end, order, -event.number, Moment(ref_of(event), True)))
    return [moment for *_, moment in sorted(timed, key=lambda each: each[:3], reverse=True)]


def retime(events: Iterable[Event], times: dict[Moment, float]) -> Iterable[Event]:
    """These at those times; what has none, since it waits for what never came, is left out."""
    for event in events:
        start = times.get(Moment(ref_of(event), False))
        if start is not None:
            yield replace(event, start=start, end=times.get(Moment(ref_of(event), True), float("inf")))
