"""Where ranks stood still, and because of whom.

A wait for a message that had not been sent yet is the sender's doing, up to the moment when it is sent; what remains is
the transfer. So it is with a receiver that comes late, and with the last rank to come to a collective.
Source: Geimer et al.: The Scalasca performance toolset architecture (2010), where these wait states are Late Sender,
Late Receiver and Wait at N x N
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.see.analyse.matching import CollectiveCall, match_collectives, match_messages
from playground.see.analyse.timeline import Ref, Timeline, ref_of
from playground.see.record.recording import COLLECTIVE, RECEIVE, SEND, Event, Recording

LATE_SENDER, LATE_RECEIVER, LAST_TO_COME = "late sender", "late receiver", "last to come"
TRANSFER = "transfer"
"""Everyone was there: what was waited for is the messages themselves."""
UNKNOWN = "unknown"
"""Nothing is recorded of what it waited for."""
UNTOLD = "cannot be told on GPUs, where wait() returns once work is issued; the device's lane shows when it was done"
"""Of waits, and of what is derived from them."""
CAUSES = (LATE_SENDER, LATE_RECEIVER, LAST_TO_COME, TRANSFER, UNKNOWN)
LATE = {SEND: LATE_RECEIVER, RECEIVE: LATE_SENDER, COLLECTIVE: LAST_TO_COME}
"""What keeps an event of this kind waiting, if its peer is late."""
FROM_ROOT = ("broadcast", "scatter")
"""Collectives in which ranks wait for the root alone."""


@dataclass(frozen=True)
class Wait:
    """A rank's standing still."""

    event: Event
    """The wait; or the call, if that waited itself."""
    awaited: Event | None
    """What it waited for; of several, that whose peer came last. None if of its peers nothing is recorded."""
    peer: Event | None
    """The other end of `awaited`: the event on another rank that had to begin first. None if there was no such."""
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
        """Of most of the time."""
        if self.awaited is None:
            return UNKNOWN
        return LATE[self.awaited.kind] if self.late > self.transfer else TRANSFER

    def by_cause(self) -> dict[str, float]:
        """Its seconds: those of the peer that was late, and the remaining ones."""
        if self.awaited is None:
            return {UNKNOWN: self.seconds}
        return {LATE[self.awaited.kind]: self.late, TRANSFER: self.transfer}


class Waits:
    """All waits of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.timeline = Timeline(recording)
        self.ends: dict[Ref, Event] = {}
        """The other end of every message."""
        for message in match_messages(recording).matched:
            self.ends[ref_of(message.send)] = message.receive
            self.ends[ref_of(message.receive)] = message.send
        self.calls: dict[Ref, CollectiveCall] = {
            ref_of(event): call for call in match_collectives(recording) for event in call.by_rank.values()
        }
        self.all: Sequence[Wait] = [self.explain(event) for event in self.timeline.waits()]
        """Rank by rank, in the order in which they began."""

    def longest(self) -> list[Wait]:
        """The longest first."""
        return sorted(self.all, key=lambda wait: (-wait.seconds, ref_of(wait.event)))

    def explain(self, event: Event) -> Wait:
        """Whom it waited for: of all whose coming it could have waited for, the last to come."""
        known = [awaited for awaited in self.timeline.awaited(event) if self.has_peers(awaited)]
        pairs = [(awaited, peer) for awaited in known for peer in self.peers(awaited)]
        causes = [pair for pair in pairs if pair[1].start <= event.end]
        if not causes:
            return Wait(event, known[0] if known else None, None, 0.0)
        awaited, peer = max(causes, key=lambda pair: (pair[1].start, pair[1].rank))
        return Wait(event, awaited, peer, min(max(peer.start - event.start, 0.0), event.seconds))

    def has_peers(self, event: Event) -> bool:
        """Whether something is recorded of the other ranks that take part in it, if there are any."""
        if event.kind != COLLECTIVE:
            return ref_of(event) in self.ends
        return len(self.calls[ref_of(event)].by_rank) > 1 or len(event.group) == 1

    def peers(self, event: Event) -> Iterator[Event]:
        """The events on other ranks that had to begin before this one could be over."""
        if event.kind != COLLECTIVE:
            if (end := self.ends.get(ref_of(event))) is not None:
                yield end
            return
        for rank, other in self.calls[ref_of(event)].by_rank.items():
            if rank != event.rank and (event.name not in FROM_ROOT or rank == event.peer):
                yield other


def seconds_by_cause(waits: Sequence[Wait]) -> dict[str, float]:
    """Of these waits together: for every cause, in the order of `CAUSES`."""
    sums = dict.fromkeys(CAUSES, 0.0)
    for wait in waits:
        for cause, seconds in wait.by_cause().items():
            sums[cause] += seconds
    return sums
