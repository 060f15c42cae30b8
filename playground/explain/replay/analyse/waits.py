"""Waits of ranks, their causes, and chains of causes that lead back to a rank that was busy.

A wait for a message that had not been sent yet is caused by the sender, up to the moment when it is
sent; the remaining time is the transfer. The same holds for a receiver that comes late, and for the
last rank to come to a collective. Source: Geimer et al.: The Scalasca performance toolset
architecture (2010), where these wait states are Late Sender, Late Receiver and Wait at N x N
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from playground.explain.replay.analyse.matching import match_collectives, match_messages
from playground.explain.replay.analyse.timeline import Lane, Lookup, Ref, Timeline, covered, ref_of
from playground.explain.replay.record.recording import (
    BUCKET,
    COLLECTIVE,
    COMPUTE,
    MAIN,
    RECEIVE,
    SEND,
    Event,
    Recording,
)

LATE_SENDER, LATE_RECEIVER, LAST_TO_COME = "late sender", "late receiver", "last to come"
TRANSFER = "transfer"
"""All ranks were there: the wait is for the messages themselves."""
UNKNOWN = "unknown"
"""Nothing is recorded of the other end."""
UNTOLD = "cannot be told on GPUs, where wait() returns once work is issued"
"""Reason why there are no waits, nor anything derived from them."""
CAUSES = (LATE_SENDER, LATE_RECEIVER, LAST_TO_COME, TRANSFER, UNKNOWN)
LATE = {
    SEND: LATE_RECEIVER, RECEIVE: LATE_SENDER, COLLECTIVE: LAST_TO_COME, BUCKET: LAST_TO_COME,
}  # fmt: skip
"""Causes of a wait for an event of this kind whose peer is late."""
FROM_ROOT = ("broadcast", "scatter")
"""Collectives in which ranks wait for the root alone."""


@dataclass(frozen=True)
class WaitState:
    """A time in which a rank stood still."""

    event: Event
    """The wait; or the call, if that waited itself."""
    awaited: Event | None
    """The event it waited for; of several, the one whose peer came last. None if nothing is
    recorded of its peers."""
    peer: Event | None
    """The other end of `awaited`: the event on another rank that had to begin first, if there was
    one."""
    late: float
    """Seconds until `peer` began."""

    @property
    def seconds(self) -> float:
        return self.event.seconds

    @property
    def transfer(self) -> float:
        """The remaining seconds."""
        return self.seconds - self.late

    @property
    def cause(self) -> str:
        """The cause of most of the time."""
        if self.awaited is None:
            return UNKNOWN
        return LATE[self.awaited.kind] if self.late > self.transfer else TRANSFER

    def by_cause(self) -> dict[str, float]:
        """Its seconds by cause: until the peer came, and after that."""
        if self.awaited is None:
            return {UNKNOWN: self.seconds}
        return {LATE[self.awaited.kind]: self.late, TRANSFER: self.transfer}


def peers_of(timeline: Timeline) -> dict[Ref, list[Event]]:
    """The events on other ranks that had to begin before a message, a collective or a bucket could
    be over, by that: without those of whose peers nothing is recorded."""
    recording = timeline.recording
    messages = match_messages(recording).matched
    peers = {ref_of(receive): [send] for send, receive in messages}
    peers |= {ref_of(send): [receive] for send, receive in messages}
    for call in match_collectives(recording):
        for rank, event in call.items():
            others = (other for each, other in call.items() if each != rank)
            if len(call) > 1 or len(event.group) == 1:
                peers[ref_of(event)] = [
                    other
                    for other in others
                    if event.name not in FROM_ROOT or other.rank == event.peer
                ]
    for call in match_collectives(recording, BUCKET):
        for rank, event in call.items():
            buckets = [other for each, other in call.items() if each != rank]
            if buckets:
                peers[ref_of(event)] = [*map(timeline.in_lane_of_backward, buckets)]
    return peers


class Waits:
    """The waits of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.timeline = Timeline(recording)
        self.peers = peers_of(self.timeline)
        events = sorted(self.timeline.waits(), key=ref_of)
        self.all: Sequence[WaitState] = [self.explain(event) for event in events]
        """The waits rank by rank, in the order in which they began."""

    def longest(self) -> list[WaitState]:
        """The waits, the longest first."""
        return sorted(self.all, key=lambda wait: (-wait.seconds, ref_of(wait.event)))

    def explain(self, event: Event) -> WaitState:
        """The wait of this event, with the last of the peers that it could have waited for."""
        known = [each for each in self.timeline.awaited(event) if ref_of(each) in self.peers]
        pairs = ((awaited, peer) for awaited in known for peer in self.peers[ref_of(awaited)])
        causes = [pair for pair in pairs if pair[1].start <= event.end]
        if not causes:
            return WaitState(event, known[0] if known else None, None, 0.0)
        awaited, peer = max(causes, key=lambda pair: (pair[1].start, pair[1].rank))
        seconds = min(max(peer.start - event.start, 0.0), event.seconds)
        return WaitState(event, awaited, peer, seconds)


def seconds_by_cause(waits: Sequence[WaitState]) -> dict[str, float]:
    """The seconds of all these waits by cause, in the order of `CAUSES`."""
    sums = dict.fromkeys(CAUSES, 0.0)
    for wait in waits:
        for cause, seconds in wait.by_cause().items():
            sums[cause] += seconds
    return sums


@dataclass(frozen=True)
class Busy:
    """A rank's own work, between two waits."""

    rank: int
    start: float
    end: float
    event: Event
    """The computation of most of the time, if recorded; otherwise the event that took the longest
    time to reach."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_recorded(self) -> bool:
        """Whether `event` is the work itself, and not what came after it."""
        return self.event.kind == COMPUTE and self.event.start < self.end


@dataclass(frozen=True)
class Chain:
    """Waits, each caused by the next one, and the work that caused the last."""

    waits: tuple[WaitState, ...]
    busy: Busy | None
    """None if the last wait was for the transfer itself, or for something that is not recorded."""


class Blamer:
    """Follows waits to their causes."""

    def __init__(self, waits: Waits) -> None:
        self.waits_of = {ref_of(wait.event): wait for wait in waits.all}
        by_lane: dict[Lane, list[Event]] = defaultdict(list)
        for wait in waits.all:
            by_lane[wait.event.rank, wait.event.lane].append(wait.event)
        self.waits = {lane: Lookup(events) for lane, events in by_lane.items()}
        self.events = {lane: Lookup(events) for lane, events in waits.timeline.lanes.items()}
        self.nothing = Lookup([])
        """What there is of a thread that has recorded nothing: of a rank's main one, if another
        makes all its calls."""

    def blame(self, wait: WaitState) -> Chain:
        """The chain of causes of this wait. While a rank waits for another's event, that rank was
        delayed by waits of its own, which the chain follows, or by its work, which ends the chain:
        whichever took longest."""
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

    def keeper(self, lane: Lane, start: float, until: Event) -> WaitState | Busy | None:
        """The longest wait or work of this lane between `start` and `until`; None if `until` began
        at `start`."""
        waits = self.waits.get(lane, self.nothing).during(start, until.start)
        edges = [start, *(edge for wait in waits for edge in (wait.start, wait.end)), until.start]
        gaps = [
            (first, last)
            for first, last in zip(edges[::2], edges[1::2], strict=True)
            if first < last
        ]
        first, last = max(gaps, key=lambda gap: gap[1] - gap[0], default=(start, start))
        longest = max(
            waits, key=lambda wait: seconds_within(wait, start, until.start), default=None
        )
        if longest is not None and seconds_within(longest, start, until.start) > last - first:
            return self.waits_of[ref_of(longest)]
        return self.work(lane, first, last, until) if first < last else None

    def work(self, lane: Lane, start: float, end: float, until: Event) -> Busy | WaitState | None:
        """The work of this lane between two waits, before `until`. A background thread that did
        nothing for most of the time had nothing to do yet: then the main thread delayed it."""
        rank, name = lane
        events = self.events.get(lane, self.nothing).during(start, end)
        recorded = covered(((event.start, event.end) for event in events), start, end)
        if name != MAIN and recorded < (end - start) / 2:
            return self.keeper((rank, MAIN), start, until)
        computations = (event for event in events if event.kind == COMPUTE)
        computed = [
            event for event in computations if seconds_within(event, start, end) > (end - start) / 2
        ]
        return Busy(
            rank,
            start,
            end,
            computed[-1] if computed else self.longest_awaited(lane, start, end, until),
        )

    def longest_awaited(self, lane: Lane, start: float, end: float, until: Event) -> Event:
        """The event of this lane, up to the first after `end`, that began longest after the events
        before it."""
        lookup = self.events.get(lane, self.nothing)
        following = lookup.after(end) or until
        events = [event for event in lookup.during(start, end) if event.start > start]
        last, found = start, []
        for event in [*events, following]:
            found.append((event.start - last, event))
            last = max(
                last, event.start, *(other.end for other in events if other.end <= event.start)
            )
        return max(found, key=lambda pair: pair[0])[1]


def seconds_within(event: Event, start: float, end: float) -> float:
    """The seconds of an event that lie between `start` and `end`, if any do."""
    return min(event.end, end) - max(event.start, start)
