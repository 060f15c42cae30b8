"""What can be looked up in a recording: an event by its number, what lies inside it, who waits for it; and an order in
which everything comes after what it needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from math import isfinite
from typing import TypeVar

from playground.see.record.recording import COLLECTIVE, DEVICE, RECEIVE, SEND, VALUES, WAIT, Event, Recording, Source

BLOCKING = (SEND, RECEIVE, COLLECTIVE)
"""Kinds whose call itself waits until they are done, unless a `wait()` follows."""
POSTS = ("isend", "irecv")
"""Calls that never wait."""
Ref = tuple[int, int]
"""An event: its rank, and its number there."""
Edge = tuple[Ref, bool]
"""The beginning of an event, or its end."""
Lane = tuple[int, str]
"""A rank and a lane of it."""
Interval = tuple[float, float]


class Timeline:
    """The events of a recording, by rank and number, by lane, and by the event around them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.by_ref: dict[Ref, Event] = {ref_of(event): event for event in recording.events()}
        self.inside: dict[Ref, list[Event]] = defaultdict(list)
        self.lanes: dict[Lane, list[Event]] = defaultdict(list)
        self.on_device: dict[Ref, Event] = {}
        """What the device tells of an event."""
        self.waited_for: set[Ref] = set()
        self.ahead = {rank.rank for rank in recording.ranks if rank.runs_ahead}
        """Ranks of which only the device knows when something was done."""
        for event in recording.events():
            if event.parent is not None:
                if event.lane == DEVICE:
                    self.on_device[event.rank, event.parent] = event
                else:
                    self.inside[event.rank, event.parent].append(event)
            self.lanes[event.rank, event.lane].append(event)
            self.waited_for |= {(event.rank, number) for number in event.awaits}
        for lane in self.lanes.values():
            lane.sort(key=lambda event: (event.start, event.number))

    @property
    def seconds(self) -> float:
        """From the beginning of the first event to the end of the last one."""
        return self.recording.end - min((event.start for event in self.by_ref.values()), default=0.0)

    def as_done(self, event: Event) -> Event | None:
        """The event as its device tells of it; None if that does not, and the rank only issued it."""
        return self.on_device.get(ref_of(event), None if event.rank in self.ahead else event)

    def awaited(self, wait: Event) -> list[Event]:
        """What it waits for: for a call that blocks, itself."""
        if wait.kind != WAIT:
            return [wait]
        found = (self.by_ref.get((wait.rank, number)) for number in wait.awaits)
        return [event for event in found if event is not None]

    def waits(self) -> Iterator[Event]:
        """The `wait()`s that ended, and the calls that blocked until they were done; the innermost ones only.

        What neither ended nor was waited for is none: nobody knows how long it took. Ranks that run ahead of their
        device have none: theirs end when the work is issued.
        """
        waiting = {
            ref_of(event)
            for (rank, _), lane in self.lanes.items()
            if rank not in self.ahead
            for place, event in enumerate(lane)
            if (event.kind == WAIT and isfinite(event.end)) or self.blocks(event, lane, place)
        }
        around = {outer for ref in waiting for outer in self.around(ref)}
        innermost = waiting - around
        return (event for ref, event in self.by_ref.items() if ref in innermost)

    def around(self, ref: Ref) -> Iterator[Ref]:
        """The events that this one lies in, from the innermost on."""
        rank, _ = ref
        event: Event | None = self.by_ref[ref]
        while event is not None and event.parent is not None:
            yield rank, event.parent
            event = self.by_ref.get((rank, event.parent))

    def blocks(self, event: Event, lane: Sequence[Event], place: int) -> bool:
        """Whether the rank stands still in this call until it is done; the call is `lane[place]`.

        It does not where somebody waits for it later, nor where the lane goes on before it is done.
        """
        ref = ref_of(event)
        if event.kind not in BLOCKING or event.name in POSTS or event.lane == DEVICE:
            return False
        if not isfinite(event.end) or ref in self.waited_for:
            return False
        following = (lane[next_one] for next_one in range(place + 1, len(lane)))
        later = takewhile(lambda other: other.start < event.end, following)
        return all(ref in self.around(ref_of(other)) for other in later)

    def is_made_of_messages(self, event: Event) -> bool:
        """Whether it is a collective of ours: of the backend's nobody sees what is inside."""
        return event.kind == COLLECTIVE and any(inner.kind != VALUES for inner in self.inside.get(ref_of(event), []))

    def source(self, event: Event) -> Source | None:
        """Its line."""
        return None if event.source is None else self.recording.sources[event.source]


class Lookup:
    """Events by time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.start, event.number))
        self.starts = [event.start for event in self.events]
        self.ends = [*accumulate((event.end for event in self.events), max)]
        """When all events up to this one were over."""

    def during(self, start: float, end: float) -> Sequence[Event]:
        """Those of which some part lies between `start` and `end`."""
        near = self.events[bisect_right(self.ends, start) : bisect_left(self.starts, end)]
        return [event for event in near if event.end > start]

    def after(self, time: float) -> Event | None:
        """The first that began then or later."""
        place = bisect_left(self.starts, time)
        return self.events[place] if place < len(self.events) else None


def ref_of(event: Event) -> Ref:
    return event.rank, event.number


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, as intervals that neither overlap nor touch, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[Interval]) -> float:
    """Seconds in all."""
    return sum(end - start for start, end in intervals)


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """What of them lies between `start` and `end`."""
    clipped = ((max(first, start), min(last, end)) for first, last in intervals)
    return [(first, last) for first, last in clipped if first < last]


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What of them lies in none of the others."""
    taken, left, place = union(others), list[Interval](), 0
    for start, end in union(intervals):
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        for first, last in taken[place : bisect_left(taken, (end,), lo=place)]:
            left.append((start, first))
            start = last
        left.append((start, end))
    return [(start, end) for start, end in left if start < end]


Where = TypeVar("Where")


def in_order(lanes: Mapping[Where, Iterable[Edge]], needs: Callable[[Edge], Iterable[Edge]]) -> dict[Edge, Where]:
    """All edges with their lanes, each after those before it on its lane and after all that it needs.

    One that needs what never comes is left out, with all behind it on its lane. Takes time linear in the number of
    edges and of their needs.
    """
    order: dict[Edge, Where] = {}
    held_up: dict[Edge, list[Iterator[Edge]]] = defaultdict(list)

    def go_along(lane: Where) -> Iterator[Edge]:
        """Yields whatever has to come before it can go on."""
        for edge in lanes[lane]:
            yield from (need for need in needs(edge) if need not in order)
            order[edge] = lane
            free.extend(held_up.pop(edge, ()))

    free = [go_along(lane) for lane in lanes]
    while free:
        walk = free.pop()
        if (missing := next(walk, None)) is not None:
            held_up[missing].append(walk)
    return order
