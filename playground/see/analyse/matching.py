"""Which events of different ranks belong together: a send and its receive, and the calls of one collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from playground.see.record.recording import COLLECTIVE, DEVICE, RECEIVE, SEND, Event, Recording


class Key(NamedTuple):
    """What a send and its receive have in common."""

    group: tuple[int, ...]
    sender: int
    receiver: int
    tag: int
    message: int


@dataclass(frozen=True)
class Message:
    """A send and its receive."""

    send: Event
    receive: Event


@dataclass(frozen=True)
class Messages:
    """All messages of a recording."""

    matched: tuple[Message, ...]
    """In the order in which they were sent."""
    unmatched: tuple[Event, ...]
    """Sends without a receive and receives without a send, in the order in which they began."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective operation, as all ranks that were recorded called it."""

    name: str
    group: tuple[int, ...]
    place: int
    """It is the so-many-th of this name in this group, from 0 on."""
    by_rank: dict[int, Event]
    """A rank that did not come to it, or was gone before, is missing."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the group called it."""
        return set(self.by_rank) == set(self.group)


def match_messages(recording: Recording) -> Messages:
    """Pair every send with its receive."""
    sends: dict[Key, Event] = {}
    receives: dict[Key, Event] = {}
    unmatched: list[Event] = []
    for event in recording.events(SEND, RECEIVE):
        key = key_of(event)
        ends = sends if event.kind == SEND else receives
        if key is None or key in ends:
            unmatched.append(event)
        else:
            ends[key] = event
    matched = [Message(send, receives[key]) for key, send in sends.items() if key in receives]
    unmatched += [send for key, send in sends.items() if key not in receives]
    unmatched += [receive for key, receive in receives.items() if key not in sends]
    return Messages(
        tuple(sorted(matched, key=lambda message: moment(message.send))), tuple(sorted(unmatched, key=moment))
    )


def key_of(event: Event) -> Key | None:
    """What this end of a message shares with its other end; None for a receive from anyone that never ended."""
    if event.peer is None or event.message is None:
        return None
    sender, receiver = (event.rank, event.peer) if event.kind == SEND else (event.peer, event.rank)
    return Key(event.group, sender, receiver, event.tag, event.message)


def match_collectives(recording: Recording) -> list[CollectiveCall]:
    """Pair the calls of all ranks, the k-th of a name in a group with the k-th of it: as all ranks must call the same
    in the same order. In the order in which they began. (What a device does of them is no call.)"""
    return pair_calls(event for event in recording.events(COLLECTIVE) if event.lane != DEVICE)


def pair_calls(events: Iterable[Event]) -> list[CollectiveCall]:
    """The same, of these events of all ranks, each rank's in its order."""
    counts: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Event]] = defaultdict(dict)
    for event in events:
        of_rank = (event.rank, event.name, event.group)
        calls[event.name, event.group, counts[of_rank]][event.rank] = event
        counts[of_rank] += 1
    whole = [CollectiveCall(*key, by_rank) for key, by_rank in calls.items()]
    return sorted(whole, key=lambda call: min(map(moment, call.by_rank.values())))


def moment(event: Event) -> tuple[float, int, int]:
    """When it began; of events that began at once, an order that is always the same."""
    return event.start, event.rank, event.number
