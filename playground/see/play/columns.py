"""A recording as the page has it: numbers in columns, small because what repeats is written once.

Times are nanoseconds since the first event and units of logical time. What begins is written as the difference to
what began before it on the same rank. An event is known by its place among the events of all ranks, rank by rank.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Hashable, Iterator, Mapping
from datetime import UTC, datetime
from math import inf, isfinite, isnan
from typing import Generic, TypeVar

from playground.see.analyse.matching import match_messages
from playground.see.analyse.timeline import Ref, Timeline, ref_of
from playground.see.paint.logical import logical_times
from playground.see.paint.scene import Drawing
from playground.see.paint.timeline import PIECES, ROW, SPANS, Lanes, add_lanes, style_of
from playground.see.play.beginning import beginning_of
from playground.see.play.chains import to_waits
from playground.see.play.holdings import Vector, changes_of
from playground.see.record.recording import Event, RankRecording, Recording

MAX_NUMBERS = 10_000
"""Numbers for which a page has room. Beyond them it shows shapes."""
NEVER = -1
"""The duration of what was not over when its rank was gone."""


Thing = TypeVar("Thing", bound=Hashable)


class Table(Generic[Thing]):
    """Things that are written once and known by their place."""

    def __init__(self) -> None:
        self.places: dict[Thing, int] = {}

    def place(self, thing: Thing) -> int:
        return self.places.setdefault(thing, len(self.places))

    @property
    def things(self) -> list[Thing]:
        return [*self.places]


class Vectors(Table[Vector]):
    """Tensors' values, as far as there is room for them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.left_out: set[Vector] = set()

    def add(self, values: Vector) -> int | None:
        """The place of these values; None if there was no room."""
        if values not in self.places:
            if self.numbers + len(values) > MAX_NUMBERS:
                self.left_out.add(values)
                return None
            self.numbers += len(values)
        return self.place(values)


def to_columns(recording: Recording) -> dict[str, object]:
    """All that the page shows of a recording: of a very long one its beginning."""
    recording, later = beginning_of(recording)
    places = {ref_of(event): place for place, event in enumerate(recording.events())}
    lanes, vectors = add_lanes(Drawing(""), recording), Vectors()
    held = [[*held_by(rank, places, vectors)] for rank in recording.ranks]
    return {
        "command": " ".join(recording.command), "backend": recording.backend, "versions": recording.versions,
        "began": datetime.fromtimestamp(recording.began, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **to_events(recording, lanes), **lanes_of(lanes), "arrows": to_arrows(recording, places), "holdings": held,
        "valuesOf": [*values_of(recording, places, vectors)], "vectors": [*map(to_numbers, vectors.things)],
        "leftOut": len(vectors.left_out), "later": later, **to_waits(recording, places),
        "sources": [[source.file, source.line, source.function] for source in recording.sources],
        "texts": pack({source.file: recording.texts.get(source.file, "") for source in recording.sources}),
    }  # fmt: skip


def to_events(recording: Recording, lanes: Lanes) -> dict[str, object]:
    """Every rank and its events: when, in logical time too, what, and in which other event."""
    steps = logical_times(recording)
    waited_for = Timeline(recording).waited_for
    whats: Table[tuple[Hashable, ...]] = Table()
    first = nanoseconds(min((event.start for event in recording.events()), default=0.0))
    ranks = []
    for rank in recording.ranks:
        columns: dict[str, list[int]] = {"start": [], "long": [], "step": [], "steps": [], "up": [], "what": []}
        now, then = first, 0
        for event in rank.events:
            start, at = nanoseconds(event.start), round(steps.get((ref_of(event), False), then))
            step_end = steps.get((ref_of(event), True))
            columns["start"].append(start - now)
            columns["long"].append(nanoseconds(event.end) - start if isfinite(event.end) else NEVER)
            columns["step"].append(at - then)
            columns["steps"].append(NEVER if step_end is None else round(step_end) - at)
            columns["up"].append(0 if event.parent is None else event.number - event.parent)
            columns["what"].append(whats.place(what_of(event, lanes, ref_of(event) in waited_for)))
            now, then = start, at
        ranks.append({
            "rank": rank.rank, "host": rank.host, "device": rank.device, "dropped": rank.dropped,
            "cutOff": rank.is_cut_off, "bound": nanoseconds(rank.clock_bound), "packed": pack(columns),
        })  # fmt: skip
    return {
        "end": max(0, nanoseconds(recording.end) - first), "steps": round(max(steps.values(), default=0)),
        "ranks": ranks, "whats": whats.things,
    }  # fmt: skip


def pack(thing: Mapping[str, object]) -> str:
    """In as few characters as may be: browsers can inflate what zlib has deflated."""
    return base64.b64encode(zlib.compress(json.dumps(thing, separators=(",", ":")).encode(), 9)).decode()


def what_of(event: Event, lanes: Lanes, is_waited_for: bool) -> tuple[Hashable, ...]:
    """What events that are repeated have in common; the script has names for these places (run.js)."""
    is_bar = event.kind in SPANS + PIECES
    style, top = (style_of(event), lanes.bar(event)[0]) if is_bar else ("", 0.0)
    return (event.kind, event.name, event.lane, style, top, int(is_waited_for), event.peer, event.nbytes, event.shape,
            event.source)  # fmt: skip


def lanes_of(lanes: Lanes) -> dict[str, object]:
    """Where the lanes are, from the top, as in the figure of the recording, and how high a bar is."""
    rows = [(rank, lane, top, lanes.heights[rank, lane]) for (rank, lane), top in lanes.tops.items()]
    return {"lanes": rows, "bar": ROW, "height": max((top + height for _, _, top, height in rows), default=0.0)}


def to_arrows(recording: Recording, places: dict[Ref, int]) -> list[int]:
    """Of each message where its send is, as the difference to the one before, and how far after that its receive."""
    arrows: list[int] = []
    last = 0
    for message in match_messages(recording).matched:
        sent, received = places[ref_of(message.send)], places[ref_of(message.receive)]
        arrows += [sent - last, received - sent]
        last = sent
    return arrows


def held_by(rank: RankRecording, places: dict[Ref, int], vectors: Vectors) -> Iterator[tuple[int, int, int | None]]:
    """Whenever what a rank holds becomes another: the event, whether at its end, and the vector.

    The vector is None where there was no room for it, and until the next one for which there is.
    """
    last: int | None = NEVER
    for change in changes_of(rank):
        vector = vectors.add(change.values)
        if vector is not None or last is not None:
            yield places[ref_of(change.event)], int(change.at_end), vector
        last = vector


def values_of(recording: Recording, places: dict[Ref, int], vectors: Vectors) -> Iterator[tuple[int, int]]:
    """The events whose values the page has, and which vector that is."""
    for event in recording.events():
        if event.values is not None and (place := vectors.add(event.values)) is not None:
            yield places[ref_of(event)], place


def to_numbers(vector: Vector) -> list[float | int | str]:
    """As JSON has them, and short. It knows neither NaN nor infinity; the script reads them from strings."""
    special = {inf: "Infinity", -inf: "-Infinity"}
    return [
        "NaN"
        if isnan(value)
        else special.get(value, int(value) if value.is_integer() and abs(value) < 2**53 else value)
        for value in vector
    ]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
