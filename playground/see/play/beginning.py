"""As much of a long recording as a page has room for: its beginning."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from playground.see.record.recording import Event, RankRecording, Recording

MAX_EVENTS = 250_000
"""For so many a page has room: with them it has about 3 MB, and is read in less than a second."""


def beginning_of(recording: Recording) -> tuple[Recording, int]:
    """The events up to the moment from which on there is no room for them, and how many there are after it.

    What is not over by then is shown as not over.
    """
    starts = sorted(event.start for event in recording.events())
    if len(starts) <= MAX_EVENTS:
        return recording, 0
    until = starts[MAX_EVENTS]
    shown = replace(recording, ranks=tuple(cut(rank, until) for rank in recording.ranks))
    return shown, len(starts) - sum(len(rank.events) for rank in shown.ranks)


def cut(rank: RankRecording, until: float) -> RankRecording:
    """What a rank did before `until`."""
    return replace(rank, events=tuple(so_far(event, until) for event in rank.events if event.start < until))


def so_far(event: Event, until: float) -> Event:
    """An event as far as it had come by `until`."""
    return event if event.end <= until else replace(event, end=inf)
