"""A recording as numbers in columns, which are small because repetitions are written once.

Times are nanoseconds since the first event and units of logical time; starts are differences to the
event before on the same rank. An event is identified by its place among the events of all ranks,
rank by rank.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite, isnan

from playground.explain.replay.analyse.holdings import Vector, holdings_of
from playground.explain.replay.analyse.logical_time import logical_times
from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.analyse.timeline import Timeline, ref_of
from playground.explain.replay.play.waits import Places, nanoseconds, to_waits
from playground.explain.replay.record.recording import RankRecording, Recording
from playground.explain.replay.render.bars import ROW
from playground.explain.replay.render.timeline import LANE_GAP, Lanes, is_bar, style_of

MAX_NUMBERS = 10_000
"""Numbers on a page. Beyond them it shows shapes."""
NEVER = -1
"""The duration of an event that was not over when its rank was gone."""
COLUMNS = ("start", "long", "step", "steps", "up", "what")

SMALL_GAP = 8
"""Pixels below a rank's lanes in a run that has no message between ranks to draw there."""


class Vectors:
    """Tensors' values, each written once, as far as there is room for them."""

    def __init__(self) -> None:
        self.places: dict[Vector, int] = {}
        self.numbers = 0
        self.left_out: set[Vector] = set()

    def add(self, values: Vector) -> int | None:
        """The place of these values; None if there was no room."""
        if values not in self.places:
            if self.numbers + len(values) > MAX_NUMBERS:
                self.left_out.add(values)
                return None
            self.numbers += len(values)
        return self.places.setdefault(values, len(self.places))


def to_columns(recording: Recording) -> dict[str, object]:
    """The data of the page."""
    still = recording.standstill
    places = {ref_of(event): place for place, event in enumerate(recording.events())}
    ends = [
        (places[ref_of(send)], places[ref_of(receive)])
        for send, receive in match_messages(recording).matched
    ]
    lanes, vectors = Lanes(recording, LANE_GAP if ends else SMALL_GAP), Vectors()
    rows = [
        (rank, lane, top, lanes.heights[rank, lane]) for (rank, lane), top in lanes.tops.items()
    ]
    return {
        "command": " ".join(recording.command),
        "backend": recording.backend,
        "versions": recording.versions,
        "began": datetime.fromtimestamp(recording.began, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **to_events(recording, lanes),
        "lanes": rows,
        "bar": ROW,
        "height": max((top + height for _, _, top, height in rows), default=0.0),
        # for each message the place of its send, relative to the one before, and that of its
        # receive relative to it
        "arrows": [
            step
            for (last, _), (sent, at) in pairwise([(0, 0), *ends])
            for step in (sent - last, at - sent)
        ],
        "holdings": [[*held_by(rank, places, vectors)] for rank in recording.ranks],
        # the places of events whose values are on the page, with those of their vectors
        "valuesOf": [
            (places[ref_of(event)], vector)
            for event in recording.events()
            if event.values is not None and (vector := vectors.add(event.values)) is not None
        ],
        "vectors": [*map(to_numbers, vectors.places)],
        "leftOut": len(vectors.left_out),
        **to_waits(recording, places),
        "standstill": still and still._asdict(),
        "ended": still.sentence if still else recording.ended.partition("\n")[0],
        "sources": [[source.file, source.line, source.function] for source in recording.sources],
        "texts": pack(
            {each.file: recording.texts.get(each.file, "") for each in recording.sources}
        ),
    }


def to_events(recording: Recording, lanes: Lanes) -> dict[str, object]:
    """The ranks with the columns of their events: times, logical times, parents and kinds; and the
    fields that repeated events have in common, `whats`, in the order in which
    run.js names their places: kind, name, lane, style, top, whether something waited for it, peer,
    bytes, shape, source, group."""
    steps, waited_for = logical_times(recording), Timeline(recording).waited_for
    whats: dict[tuple[object, ...], int] = {}
    first = nanoseconds(recording.start)
    ranks = []
    for rank in recording.ranks:
        columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
        now, then = first, 0
        for event in rank.events:
            ref, start = ref_of(event), nanoseconds(event.start)
            at, step_end = round(steps.get((*ref, False), then)), steps.get((*ref, True))
            bar = (style_of(event), lanes.top(event)) if is_bar(event) else ("", 0.0)
            what = (
                event.kind, event.name, event.lane, *bar, int(ref in waited_for),
                event.number_of_peer, event.nbytes, event.shape, event.source, event.group,
            )  # fmt: skip
            columns["start"].append(start - now)
            columns["long"].append(nanoseconds(event.end) - start if isfinite(event.end) else NEVER)
            columns["step"].append(at - then)
            columns["steps"].append(NEVER if step_end is None else round(step_end) - at)
            columns["up"].append(0 if event.parent is None else event.number - event.parent)
            columns["what"].append(whats.setdefault(what, len(whats)))
            now, then = start, at
        about = {"rank": rank.rank, "device": rank.device, "dropped": rank.dropped}
        ranks.append({**about, "cutOff": rank.is_cut_off, "packed": pack(columns)})
    end, last = max(0, nanoseconds(recording.end) - first), round(max(steps.values(), default=0))
    return {"end": end, "steps": last, "ranks": ranks, "whats": [*whats]}


def pack(thing: Mapping[str, object]) -> str:
    """Deflated JSON in base64, which browsers can inflate."""
    packed = zlib.compress(json.dumps(thing, separators=(",", ":")).encode(), 9)
    return base64.b64encode(packed).decode()


def held_by(
    rank: RankRecording, places: Places, vectors: Vectors
) -> Iterator[tuple[int, int, int | None]]:
    """The changes of what a rank holds: the event, whether at its end, and the vector.

    The vector is None where there was no room for it, and until the next one for which there is.
    """
    last: int | None = NEVER
    for event, at_end, values in holdings_of(rank):
        vector = vectors.add(values)
        if vector is not None or last is not None:
            yield places[ref_of(event)], int(at_end), vector
        last = vector


def to_numbers(vector: Vector) -> list[float | int | str]:
    """Numbers as JSON, whole ones without a point. NaN and infinity become strings, as JavaScript
    reads them."""

    def to_number(value: float) -> float | int | str:
        if isnan(value):
            return "NaN"
        if not isfinite(value):
            return "Infinity" if value > 0 else "-Infinity"
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    return [*map(to_number, vector)]
