"""A recording as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and other readers of such traces.

A process is a rank. A thread is one of its lanes, or a row below it: slices of one thread must lie in each other or
beside each other, so those that partially overlap are moved to a row of their own. An arrow leads from a short slice
`sent` to one without length, `arrived`, because arrows there connect slices.
Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import TypedDict

from playground.see.analyse import match_messages
from playground.see.record import GRADIENT, RECEIVE, SEND, VALUES, Event, Recording

SENT = 1e-6
"""Seconds that a slice `sent` is long, at most: an arrow begins in it."""
MESSAGES = "messages"
"""The lane of sends and receives, which overlap with everything."""


class Entry(TypedDict, total=False):
    """One event of the format."""

    name: str
    cat: str
    ph: str
    s: str
    bp: str
    id: int
    pid: int
    tid: int
    ts: float
    dur: float
    """Microseconds, as `ts` is."""
    args: dict[str, object]


def to_chrome(recording: Recording) -> str:
    """The recording as a trace file."""
    document = {
        "traceEvents": [*entries(recording)],
        "displayTimeUnit": "ns",
        "otherData": {
            "command": " ".join(recording.command),
            "backend": recording.backend,
            **recording.versions,
            "dropped": str(sum(rank.dropped for rank in recording.ranks)),
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def entries(recording: Recording) -> Iterator[Entry]:
    """Rank by rank: its name, its lanes' names, its events, and the ends of its messages."""
    ends: dict[int, list[Entry]] = {rank.rank: [] for rank in recording.ranks}
    for number, message in enumerate(match_messages(recording).matched):
        if isfinite(message.receive.end):
            ends[message.send.rank].append(end_of(message.send, number))
            ends[message.receive.rank].append(end_of(message.receive, number))
    for rank in recording.ranks:
        lanes: dict[str, list[Entry]] = {}
        for event in rank.events:
            lane = MESSAGES if event.kind in (SEND, RECEIVE) else event.lane
            lanes.setdefault(lane, []).append(entry_of(recording, event))
        if ends[rank.rank]:
            lanes[f"{MESSAGES}: sent, arrived"] = ends[rank.rank]
        yield named("process_name", rank.rank, 0, f"rank {rank.rank} ({rank.host}, {rank.device})")
        rows = ((lane, row) for lane, slices in lanes.items() for row in rows_of(slices))
        for thread, (lane, row) in enumerate(rows):
            place: Entry = {"pid": rank.rank, "tid": thread}
            yield named("thread_name", rank.rank, thread, lane)
            for entry in row:
                yield {**entry, **place}
                if "id" in entry:
                    yield {**arrow_end(entry), **place}


def rows_of(slices: Iterable[Entry]) -> list[list[Entry]]:
    """The slices in rows, in each of which no two overlap unless one contains the other."""
    rows: list[tuple[list[Entry], list[float]]] = []
    """Each with the ends of the slices that are open in it, outermost first."""
    for entry in sorted(slices, key=lambda entry: (entry["ts"], -entry.get("dur", 0.0))):
        start, end = entry["ts"], entry["ts"] + entry.get("dur", 0.0)
        row, until = next((each for each in rows if is_free(each[1], start, end)), ([], []))
        if not row:
            rows.append((row, until))
        row.append(entry)
        until.append(end)
    return [row for row, _ in rows]


def is_free(until: list[float], start: float, end: float) -> bool:
    """Whether a slice fits among the open ones, which end at `until`. Those over by `start` are removed."""
    while until and until[-1] <= start:
        until.pop()
    return not until or end <= until[-1]


def entry_of(recording: Recording, event: Event) -> Entry:
    """An event as a slice, or as an instant."""
    entry: Entry = {"name": event.name, "cat": event.kind, "ts": microseconds(event.start)}
    entry["args"] = arguments(recording, event)
    if event.kind in (GRADIENT, VALUES):
        return {**entry, "ph": "i", "s": "t"}
    end = event.end if isfinite(event.end) else max(recording.end, event.start)
    return {**entry, "ph": "X", "dur": round(microseconds(end) - entry["ts"], 3)}


def arguments(recording: Recording, event: Event) -> dict[str, object]:
    """The fields of an event besides its time. JSON has neither NaN nor infinity: they become strings."""
    found: dict[str, object] = {"number": event.number}
    for name in ("peer", "nbytes", "message", "tag", "offset", "group", "shape", "values", "awaits"):
        value = getattr(event, name)
        if isinstance(value, tuple) and value:
            found[name] = [each if isfinite(each) else str(each) for each in value]
        elif isinstance(value, int) and (value or name in ("peer", "message", "offset")):
            found[name] = value
    if event.source is not None:
        source = recording.sources[event.source]
        found["source"] = f"{source.file}:{source.line} in {source.function}"
    if not isfinite(event.end):
        found["cut off"] = True
    return found


def end_of(event: Event, number: int) -> Entry:
    """The slice at which the arrow of message `number` begins or ends."""
    is_send = event.kind == SEND
    return {
        "name": "sent" if is_send else "arrived",
        "cat": "message",
        "ph": "X",
        "id": number,
        "ts": microseconds(event.start if is_send else event.end),
        "dur": round(min(event.seconds, SENT) * 1e6, 3) if is_send else 0,
    }


def arrow_end(entry: Entry) -> Entry:
    """The end of the arrow at such a slice."""
    begins = entry["name"] == "sent"
    end: Entry = {
        "name": "message",
        "cat": "message",
        "ph": "s" if begins else "f",
        "id": entry["id"],
        "ts": entry["ts"],
    }
    return end if begins else {**end, "bp": "e"}


def named(what: str, rank: int, thread: int, name: str) -> Entry:
    """The name of a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def microseconds(seconds: float) -> float:
    """Microseconds, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)
