"""A recording as a Chrome trace, for Perfetto."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from math import isfinite

from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.record.recording import (
    COMPUTE,
    GRADIENT,
    MAIN,
    MOVE,
    PHASE,
    VALUES,
    WAIT,
    Event,
    Recording,
)

SENT = 1e-6
"""Seconds that a slice `sent` is long, at most: an arrow begins in it."""
NESTED = (PHASE, COMPUTE, WAIT, MOVE)
"""Kinds whose events in a main thread lie in each other or beside each other."""
Entry = dict[str, object]
"""One event of the format. `ts` and `dur` are in microseconds."""


def to_chrome(recording: Recording) -> str:
    """The recording as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and other readers of
    such traces.

    Source: the Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    about = {"command": " ".join(recording.command), "backend": recording.backend}
    about |= {**recording.versions, "dropped": str(sum(rank.dropped for rank in recording.ranks))}
    found = [*event_entries(recording), *message_entries(recording)]
    document = {"traceEvents": found, "displayTimeUnit": "ns", "otherData": about}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def event_entries(recording: Recording) -> Iterator[Entry]:
    """The entries of events. A process is a rank, and its thread 0 the main one. Slices of a thread
    must lie in each other or beside each other: what may overlap is asynchronous, which has rows of
    its own."""
    numbers, last = itertools.count(), recording.end
    for rank in recording.ranks:
        where = {"pid": rank.rank, "tid": 0}
        name = f"rank {rank.rank} ({rank.device})"
        yield {"name": "process_name", "ph": "M", **where, "args": {"name": name}}
        yield {"name": "thread_name", "ph": "M", **where, "args": {"name": MAIN}}
        for event in rank.events:
            start = microseconds(event.start)
            end = microseconds(event.end if isfinite(event.end) else max(last, event.start))
            about = {"name": event.name, "cat": event.kind, **where}
            entry = {**about, "ts": start, "args": arguments(recording, event)}
            if event.kind in (GRADIENT, VALUES):
                yield entry | {"ph": "i", "s": "t"}
            elif event.kind in NESTED and event.lane == MAIN:
                yield entry | {"ph": "X", "dur": round(end - start, 3)}
            else:
                yield entry | {"ph": "b", "id": (number := next(numbers))}
                yield about | {"ph": "e", "id": number, "ts": end}


def message_entries(recording: Recording) -> Iterator[Entry]:
    """The arrows of messages. An arrow leads from a short slice `sent` to one without length,
    `arrived`, in a thread of their own, because arrows connect slices."""
    for rank in recording.ranks:
        where = {"pid": rank.rank, "tid": 1}
        yield {"name": "thread_name", "ph": "M", **where, "args": {"name": "messages"}}
    for number, (send, receive) in enumerate(match_messages(recording).matched):
        if isfinite(receive.end):
            what = {"cat": "message", "id": number}
            sent = {**what, "pid": send.rank, "tid": 1, "ts": microseconds(send.start)}
            arrived = {**what, "pid": receive.rank, "tid": 1, "ts": microseconds(receive.end)}
            yield {"name": "sent", "ph": "X", **sent, "dur": microseconds(min(send.seconds, SENT))}
            yield {"name": "message", "ph": "s", **sent}
            yield {"name": "arrived", "ph": "X", **arrived, "dur": 0.0}
            yield {"name": "message", "ph": "f", "bp": "e", **arrived}


def arguments(recording: Recording, event: Event) -> dict[str, object]:
    """The fields of an event besides its time."""
    names = ("number", "peer", "nbytes", "message", "tag", "offset", "group", "shape", "awaits")
    found = {name: value for name in names if (value := getattr(event, name)) not in (None, ())}
    if event.is_with_stranger:
        found["peer"] = event.number_of_peer
    if event.source is not None:
        source = recording.sources[event.source]
        found["source"] = f"{source.file}:{source.line} in {source.function}"
    return found if isfinite(event.end) else found | {"cut off": True}


def microseconds(seconds: float) -> float:
    """Microseconds, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)
