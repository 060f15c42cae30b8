"""Events of different ranks that belong together: a send and its receive, or the calls of one
collective."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from playground.explain.replay.record.recording import COLLECTIVE, RECEIVE, SEND, Event, Recording


class MatchedMessage(NamedTuple):
    """A send and its receive."""

    send: Event
    receive: Event


class Matches(NamedTuple):
    """The messages of a recording."""

    matched: list[MatchedMessage]
    """In the order in which they were sent."""
    unmatched: list[Event]
    """Sends without a receive and receives without a send, in the order in which they began."""


def match_messages(recording: Recording) -> Matches:
    """Pair every send with its receive."""
    ends: dict[str, dict[object, Event]] = {SEND: {}, RECEIVE: {}}
    unmatched: list[Event] = []
    for event in recording.events(SEND, RECEIVE):
        way = (event.rank, event.peer) if event.kind == SEND else (event.peer, event.rank)
        key = event.group, way, event.tag, event.message
        # None: from anyone, and never ended
        if event.message is None or event.peer is None or key in ends[event.kind]:
            unmatched.append(event)
        else:
            ends[event.kind][key] = event
    sends, receives = ends.values()
    matched = [
        MatchedMessage(send, receives[key]) for key, send in sends.items() if key in receives
    ]
    unmatched += [
        event for key, event in (sends | receives).items() if not (key in sends and key in receives)
    ]
    matched.sort(key=lambda message: moment(message.send))
    return Matches(matched, sorted(unmatched, key=moment))


def match_collectives(recording: Recording, kind: str = COLLECTIVE) -> list[dict[int, Event]]:
    """Pair the calls of all ranks, the k-th of a name in a group with the k-th of it: all ranks
    must call the same in the same order. In the order in which they began, each the calls by
    rank. `kind`: `COLLECTIVE`, or `BUCKET` for the all-reduces within DDP's backward."""
    counts: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Event]] = defaultdict(dict)
    for event in recording.events(kind):
        of_rank = (event.rank, event.name, event.group)
        calls[event.name, event.group, counts[of_rank]][event.rank] = event
        counts[of_rank] += 1
    return sorted(calls.values(), key=lambda call: min(map(moment, call.values())))


def moment(event: Event) -> tuple[float, int, int]:
    """A sort key: the start of an event, with ties in a fixed order."""
    return event.start, event.rank, event.number
