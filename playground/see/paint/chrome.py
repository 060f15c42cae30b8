"""A recording as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and everything else that reads such traces.

A process is a rank. A thread is one of its lanes, or a row below it: slices of one thread must lie in each other or
beside each other, and those that would do neither are moved to a row of their own. An arrow leads from a short slice
`sent` to one without length, `arrived`, because arrows there connect slices.
Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from math import isfinite

from playground.see.analyse.messages import match_messages
from playground.see.record.recording import GRADIENT, RECEIVE, SEND, VALUES, Event, RankRecording, Recording

SENT = 1e-6
"""Seconds that a slice `sent` is long, at most: an arrow begins in it."""
INSTANTS = (GRADIENT, VALUES)
MESSAGES = "messages"
"""The lane of sends and receives, which overlap with everything."""
Field = str | int | float | dict[str, object]
Entry = dict[str, Field]
"""One event of the format."""


def to_chrome(recording: Recording) -> str:
    """The whole file."""
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
    ends: dict[int, list[tuple[Event, int]]] = {rank.rank: [] for rank in recording.ranks}
    for number, message in enumerate(match_messages(recording).matched):
        if isfinite(message.receive.end):
            ends[message.send.rank].append((message.send, number))
            ends[message.receive.rank].append((message.receive, number))
    for rank in recording.ranks:
        yield named("process_name", rank.rank, 0, f"rank {rank.rank} ({rank.host}, {rank.device})")
        yield from rank_entries(recording, rank, ends[rank.rank])


def rank_entries(recording: Recording, rank: RankRecording, ends: list[tuple[Event, int]]) -> Iterator[Entry]:
    """The slices and instants of a rank, in as many threads as it takes."""
    lanes: dict[str, list[Entry]] = {}
    for event in rank.events:
        lane = MESSAGES if event.kind in (SEND, RECEIVE) else event.lane
        lanes.setdefault(lane, []).append(entry_of(recording, event))
    for event, number in ends:
        lanes.setdefault(f"{MESSAGES}: sent, arrived", []).append(end_of(event, number))
    threads = count()
    for lane, slices in lanes.items():
        for row in rows_of(slices):
            thread = next(threads)
            yield named("thread_name", rank.rank, thread, lane)
            for entry in row:
                place: Entry = {"pid": rank.rank, "tid": thread}
                yield {**entry, **place}
                if "id" in entry:
                    yield {**arrow_end(entry), **place}


def rows_of(slices: Iterable[Entry]) -> list[list[Entry]]:
    """These in rows, in each of which no two overlap unless one lies in the other."""
    rows: list[list[Entry]] = []
    open_until: list[list[float]] = []
    for entry in sorted(slices, key=lambda entry: (float_of(entry, "ts"), -float_of(entry, "dur"))):
        start, end = float_of(entry, "ts"), float_of(entry, "ts") + float_of(entry, "dur")
        place = next((place for place, until in enumerate(open_until) if is_free(until, start, end)), len(rows))
        if place == len(rows):
            rows.append([])
            open_until.append([])
        rows[place].append(entry)
        open_until[place].append(end)
    return rows


def is_free(until: list[float], start: float, end: float) -> bool:
    """Whether a slice has room in a row. `until` are the ends of what is open there, outermost first: what is over by
    `start` is taken off."""
    while until and until[-1] <= start:
        until.pop()
    return not until or end <= until[-1]


def float_of(entry: Entry, name: str) -> float:
    """A number of an entry; 0 if it has none of this name."""
    value = entry.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


def entry_of(recording: Recording, event: Event) -> Entry:
    """An event as a slice, or as an instant."""
    entry: Entry = {"name": event.name, "cat": event.kind, "ts": microseconds(event.start)}
    entry["args"] = arguments(recording, event)
    if event.kind in INSTANTS:
        return {**entry, "ph": "i", "s": "t"}
    end = event.end if isfinite(event.end) else max(recording.end, event.start)
    return {**entry, "ph": "X", "dur": round(microseconds(end) - microseconds(event.start), 3)}


def arguments(recording: Recording, event: Event) -> dict[str, object]:
    """What is known of an event besides its time."""
    found: dict[str, object] = {"number": event.number}
    for name in ("peer", "nbytes", "message", "tag", "offset", "group", "shape", "values", "awaits"):
        value = getattr(event, name)
        if value not in (None, 0, ()) or (name in ("peer", "message", "offset") and value == 0):
            found[name] = [to_json(each) for each in value] if isinstance(value, tuple) else value
    if event.source is not None:
        source = recording.sources[event.source]
        found["source"] = f"{source.file}:{source.line} in {source.function}"
    if not isfinite(event.end):
        found["cut off"] = True
    return found


def to_json(number: float) -> float | str:
    """JSON knows neither NaN nor infinity."""
    return number if isfinite(number) else str(number)


def end_of(event: Event, number: int) -> Entry:
    """The slice at which the arrow of a message begins or ends: its `id` says which arrow."""
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
    """The end of an arrow that lies at such a slice."""
    begins = entry["name"] == "sent"
    end: Entry = {"name": "message", "cat": "message", "ph": "s" if begins else "f", "id": entry["id"]}
    return {**end, "ts": entry["ts"]} if begins else {**end, "ts": entry["ts"], "bp": "e"}


def named(what: str, rank: int, thread: int, name: str) -> Entry:
    """What a process or a thread is called."""
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def microseconds(seconds: float) -> float:
    """To a nanosecond."""
    return round(seconds * 1e6, 3)
