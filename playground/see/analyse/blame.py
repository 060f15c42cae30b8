"""From a wait to what caused it: to the rank that came late, to what kept that one, and on to one that was busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from playground.see.analyse.timeline import Interval, Lane, Lookup, clip, ref_of, total, union
from playground.see.analyse.waits import LATE, Wait, Waits
from playground.see.record.recording import COMPUTE, MAIN, Event, Recording


@dataclass(frozen=True)
class Busy:
    """A rank's own work, between two waits."""

    rank: int
    start: float
    end: float
    event: Event
    """What was computed for most of the time, if that is recorded; else, of what the rank did then, that for which it
    took the longest time to come to it."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_recorded(self) -> bool:
        """Whether `event` is what the rank was busy with, and not what came after it."""
        return self.event.kind == COMPUTE and self.event.start < self.end


@dataclass(frozen=True)
class Chain:
    """Waits, each caused by the next one, and what caused the last."""

    waits: tuple[Wait, ...]
    busy: Busy | None
    """None where the last wait was for the transfer itself, or for something that is not recorded."""

    @property
    def rank(self) -> int:
        """Where the chain ends."""
        return self.waits[-1].event.rank if self.busy is None else self.busy.rank


class Blamer:
    """Follows waits to their causes."""

    def __init__(self, waits: Waits) -> None:
        self.waits_of = {ref_of(wait.event): wait for wait in waits.all}
        by_lane: dict[Lane, list[Event]] = defaultdict(list)
        for wait in waits.all:
            by_lane[wait.event.rank, wait.event.lane].append(wait.event)
        self.waits = {lane: Lookup(events) for lane, events in by_lane.items()}
        self.events = {lane: Lookup(events) for lane, events in waits.timeline.lanes.items()}

    def blame(self, wait: Wait) -> Chain:
        """From this wait to what caused it.

        While a rank waits for another's event, that one was kept from it by waits of its own, which the chain follows,
        or by its work, which ends the chain: by the one that took it longest.
        """
        chain, seen, start = [wait], {ref_of(wait.event)}, wait.event.start
        while wait.peer is not None and wait.cause in LATE.values():
            kept = self.keeper((wait.peer.rank, wait.peer.lane), start, wait.peer)
            if isinstance(kept, Busy):
                return Chain(tuple(chain), kept)
            if kept is None or ref_of(kept.event) in seen:
                break
            wait, start = kept, max(start, kept.event.start)
            seen.add(ref_of(wait.event))
            chain.append(wait)
        return Chain(tuple(chain), None)

    def keeper(self, lane: Lane, start: float, until: Event) -> Wait | Busy | None:
        """What kept this lane from `until` for the longest time since `start`; None if that is when `until` began."""
        waits = self.waits[lane].during(start, until.start) if lane in self.waits else []
        first, last = max(gaps_between(waits, start, until.start), key=length, default=(start, start))
        longest = max(waits, key=lambda event: length(within(event, start, until.start)), default=None)
        if longest is not None and length(within(longest, start, until.start)) > last - first:
            return self.waits_of[ref_of(longest)]
        return self.work(lane, first, last, until) if first < last else None

    def work(self, lane: Lane, start: float, end: float, until: Event) -> Busy | Wait | None:
        """What the rank did between two waits of this lane, before `until`.

        A thread beside the main one that did nothing for most of the time had nothing to do yet: then the main one kept
        it.
        """
        rank, name = lane
        events = self.events[lane].during(start, end)
        recorded = union(clip([(event.start, event.end) for event in events], start, end))
        if name != MAIN and total(recorded) < (end - start) / 2:
            return self.keeper((rank, MAIN), start, until)
        computed = [event for event in events if event.kind == COMPUTE
                    and length(within(event, start, end)) > (end - start) / 2]  # fmt: skip
        return Busy(rank, start, end, computed[-1] if computed else self.longest_awaited(lane, start, end, until))

    def longest_awaited(self, lane: Lane, start: float, end: float, until: Event) -> Event:
        """The event of this lane, up to the first after `end`, whose beginning was the longest time after whatever
        happened before it."""
        following = self.events[lane].after(end) or until
        events = [event for event in self.events[lane].during(start, end) if event.start > start]
        last, found = start, []
        for event in [*events, following]:
            found.append((event.start - last, event))
            last = max(last, event.start, *(other.end for other in events if other.end <= event.start))
        return max(found, key=lambda pair: pair[0])[1]


def gaps_between(waits: Sequence[Event], start: float, end: float) -> list[Interval]:
    """What of the time from `start` to `end` lies in none of these."""
    edges = [start, *(edge for wait in waits for edge in (wait.start, wait.end)), end]
    return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]


def within(event: Event, start: float, end: float) -> Interval:
    """What of an event lies between `start` and `end`."""
    return max(event.start, start), min(event.end, end)


def length(interval: Interval) -> float:
    return interval[1] - interval[0]


def blame(recording: Recording, wait: Event) -> Chain:
    """From a wait of this recording to what caused it. For many of them, keep one `Blamer`.

    Raises `KeyError` if this event is none of its waits.
    """
    blamer = Blamer(Waits(recording))
    return blamer.blame(blamer.waits_of[ref_of(wait)])
