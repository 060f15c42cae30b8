"""Look-ups in a recording: events by number, by time, by the event around them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from math import isfinite

from playground.explain.replay.record.recording import (
    BUCKET,
    COLLECTIVE,
    RECEIVE,
    SEND,
    WAIT,
    Event,
    Recording,
)

BLOCKING = (SEND, RECEIVE, COLLECTIVE)
"""Kinds whose call itself waits until it is done, unless a `wait()` follows."""
POSTS = ("isend", "irecv")
"""Calls that never wait."""
Ref = tuple[int, int]
"""An event: its rank, and its number there."""
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
        """The `wait()`s that ended, and the calls that blocked until they were done, the innermost
        ones only; and those of DDP's backward passes, of which no other wait is a part.

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
        around = {outer for ref in waiting for outer in self.around(ref)}
        yield from (event for ref, event in self.by_ref.items() if ref in waiting - around)
        yield from (wait for ref, wait in self.waits_in_backward() if ref not in around)

    def waits_in_backward(self) -> Iterator[tuple[Ref, Event]]:
        """Backward passes of DistributedDataParallel, each with its wait: from its last bucket on,
        which leaves when the last gradient is ready."""
        buckets: dict[Ref, list[Event]] = defaultdict(list)
        for event in self.recording.events(BUCKET):
            if event.parent is not None and event.rank not in self.ahead:
                buckets[event.rank, event.parent].append(event)
        for ref, its in buckets.items():
            last, end = max(its, key=lambda each: each.start), self.by_ref[ref].end
            end = min(end, max(each.end for each in its))
            if isfinite(end) and end > last.start:
                yield ref, replace(self.in_lane_of_backward(last), end=end)

    def in_lane_of_backward(self, bucket: Event) -> Event:
        """The bucket, in the lane of its backward pass. (Autograd has threads of its own.)"""
        backward = None if bucket.parent is None else self.by_ref.get((bucket.rank, bucket.parent))
        return replace(bucket, lane=backward.lane) if backward else bucket

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
