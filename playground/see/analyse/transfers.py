"""What every wait needed before it could end, and how long the transfers took: what a replay is made of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from playground.see.analyse.links import Link, Transfer, fit_link
from playground.see.analyse.timeline import BLOCKING, Edge, Ref, ref_of
from playground.see.analyse.waits import Wait, Waits
from playground.see.record.recording import COLLECTIVE, Event

MESSAGES = "messages"
"""Sends and receives, as a kind of transfer. Every collective of the backend is one, by its name."""


@dataclass(frozen=True)
class Dependency:
    """Something that a wait waited for."""

    sources: tuple[Edge, ...]
    """What has to have been before its transfer can begin."""
    begins: float
    """When the last of them was."""
    seconds: float
    """What the transfer took."""
    nbytes: int
    link: Link | None
    """None where what is waited for is another thread of the same rank."""


class Transfers:
    """All waits of a recording as dependencies."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.links = self.fit()
        """By kind."""
        self.needs: dict[Ref, list[Dependency]] = {}
        """Of every wait."""
        self.overhead: dict[Ref, float] = {}
        """What a wait takes if everything is there."""
        for wait in waits.all:
            self.resolve(wait)

    def fit(self) -> dict[str, Link]:
        """The links that the transfers show which somebody waited for from their beginning; of a kind of which there
        are none, all."""
        sure: dict[str, list[Transfer]] = defaultdict(list)
        others: dict[str, list[Transfer]] = defaultdict(list)
        for wait in self.waits.all:
            if wait.awaited is not None and not self.waits.timeline.is_made_of_messages(wait.awaited):
                begins = max(when for _, when in self.sources(wait.awaited, wait.event))
                seconds = wait.event.end - begins
                (sure if wait.late > 0 else others)[kind_of(wait.awaited)].append((wait.awaited.nbytes, seconds))
        return {kind: fit_link(sure[kind] or others[kind]) for kind in sorted(sure.keys() | others.keys())}

    def resolve(self, wait: Wait) -> None:
        """Find what this wait needed. If nothing can have held it up, all of it is overhead."""
        event = wait.event
        found = [self.dependency(awaited, event) for awaited in self.waits.timeline.awaited(event)]
        needs = [need for need in found if need is not None]
        decisive = max(needs, key=lambda need: need.begins + need.seconds, default=None)
        blocked = decisive is not None and decisive.begins + decisive.seconds > event.start
        self.overhead[ref_of(event)] = 0.0 if blocked else event.seconds
        self.needs[ref_of(event)] = [
            replace(need, seconds=event.end - need.begins) if blocked and need is decisive else need for need in needs
        ]

    def dependency(self, awaited: Event, wait: Event) -> Dependency | None:
        """What `wait` needs of this. The transfer takes what the link says, unless that would be too long."""
        if self.waits.timeline.is_made_of_messages(awaited):
            over = ((ref_of(awaited), True),)
            return Dependency(over, awaited.end, 0.0, 0, None) if awaited.end <= wait.end else None
        link = self.links.get(kind_of(awaited))
        if link is None or awaited.kind not in BLOCKING:
            return None
        sources = self.sources(awaited, wait)
        begins = max(when for _, when in sources)
        seconds = min(link.seconds(awaited.nbytes), wait.end - begins)
        return Dependency(tuple(edge for edge, _ in sources), begins, seconds, awaited.nbytes, link)

    def sources(self, awaited: Event, wait: Event) -> list[tuple[Edge, float]]:
        """The beginnings of this event and of its peers that came before the wait was over, and when they were."""
        events = [awaited, *(peer for peer in self.waits.peers(awaited) if peer.start <= wait.end)]
        return [((ref_of(event), False), event.start) for event in events]


def kind_of(event: Event) -> str:
    """Which transfers it is one of."""
    return event.name if event.kind == COLLECTIVE else MESSAGES
