"""What every rank holds, and since when: derived from recorded values alone.

`VALUES` and the end of a collective tell all of a tensor. Inside a collective, a chunk of it is known where that is
sent or has been computed. (What is received there may be kept or be added to a chunk: it shows when that is sent on.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from playground.see.record.recording import COLLECTIVE, RECEIVE, SEND, VALUES, Event, RankRecording

Vector = tuple[float, ...]


@dataclass(frozen=True)
class Change:
    """From the beginning, or from the end, of this event on, the rank holds these values."""

    event: Event
    at_end: bool
    values: Vector


def changes_of(rank: RankRecording) -> Iterator[Change]:
    """Whenever what this rank holds becomes another, in the order of time."""
    parts = parts_of_collectives(rank)
    held: Vector = ()
    for event, at_end in moments_with_values(rank):
        values = event.values or ()
        if event.number in parts:
            if event.kind == RECEIVE or event.offset is None or event.offset + len(values) > len(held):
                continue
            values = (*held[: event.offset], *values, *held[event.offset + len(values) :])
        if values != held:
            held = values
            yield Change(event, at_end, held)


def moments_with_values(rank: RankRecording) -> list[tuple[Event, bool]]:
    """What is sent was there before; everything else has its values when it is over.

    Of what happens at the same moment a collective comes last: it ends around its messages.
    """
    found = [
        (event, event.kind != SEND)
        for event in rank.events
        if event.values is not None and (event.kind == SEND or isfinite(event.end))
    ]
    return sorted(
        found,
        key=lambda each: (each[0].end if each[1] else each[0].start, each[0].kind == COLLECTIVE, each[0].number),
    )


def parts_of_collectives(rank: RankRecording) -> set[int]:
    """The numbers of what happens inside collectives to chunks of their tensors."""
    inside: set[int] = set()
    parts: set[int] = set()
    collectives = {event.number for event in rank.events if event.kind == COLLECTIVE}
    for event in rank.events:
        if event.parent in collectives or event.parent in inside:
            inside.add(event.number)
            if event.kind not in (COLLECTIVE, VALUES):
                parts.add(event.number)
    return parts
