"""The values that a rank holds, by time."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from playground.explain.replay.record.recording import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    VALUES,
    Event,
    RankRecording,
)

Vector = tuple[float, ...]


class HeldValues(NamedTuple):
    """From the start, or from the end, of this event on, the rank holds these values."""

    event: Event
    at_end: bool
    values: Vector

    @property
    def time(self) -> float:
        return self.event.end if self.at_end else self.event.start


def holdings_of(rank: RankRecording) -> Iterator[HeldValues]:
    """The contents of this rank's tensors, in the order of time.

    They are derived from recorded values alone. `VALUES` and the end of a collective have a whole
    tensor. Inside a collective, a chunk of it is known where it is sent or has been computed. (A
    received chunk may be kept or added to another: it shows when that is sent on.)
    """
    around = {event.number for event in rank.events if event.kind == COLLECTIVE}
    parts: set[int] = set()
    """The numbers of events that concern a chunk of a collective's tensor."""
    for event in rank.events:
        if event.parent in around:
            around.add(event.number)
            if event.kind not in (COLLECTIVE, VALUES):
                parts.add(event.number)
    known = [
        HeldValues(event, event.kind != SEND, event.values)  # what is sent was there before
        for event in rank.events
        if event.values is not None and (event.kind == SEND or isfinite(event.end))
    ]
    # Of several at the same moment, a collective comes last: it ends around its messages.
    known.sort(key=lambda each: (each.time, each.event.kind == COLLECTIVE, each.event.number))
    held: Vector = ()
    for event, at_end, values in known:
        if event.number in parts:
            if (
                event.kind == RECEIVE
                or event.offset is None
                or event.offset + len(values) > len(held)
            ):
                continue
            values = (*held[: event.offset], *values, *held[event.offset + len(values) :])
        if values != held:
            held = values
            yield HeldValues(event, at_end, held)
