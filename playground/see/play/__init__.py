"""The page that plays a recording: a template, a style sheet, a script and the recording, all in one file.

The page has a recording as numbers in columns, which are small because repetitions are written once. Times are
nanoseconds since the first event and units of logical time; starts are differences to the event before on the same
rank. An event is identified by its place among the events of all ranks, rank by rank.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import inf, isfinite, isnan
from pathlib import Path
from string import Template

from playground.see.analyse import Ref, Timeline, Vector, holdings_of, logical_times, match_messages, ref_of
from playground.see.analyse.waits import CAUSES, UNTOLD, Blamer, Chain, Waits, WaitState
from playground.see.paint import INK, PAPER, STYLES
from playground.see.paint.painters import css_variables
from playground.see.paint.timeline import PIECES, ROW, SPANS, Lanes, style_of
from playground.see.record import Event, RankRecording, Recording

MAX_EVENTS = 250_000
"""Events on a page, which then has about 3 MB, and is read in less than a second."""


def beginning_of(recording: Recording) -> tuple[Recording, int]:
    """The first `MAX_EVENTS` events, and how many there are after them.

    Events that are not over by the end of these are shown as not over.
    """
    starts = sorted(event.start for event in recording.events())
    if len(starts) <= MAX_EVENTS:
        return recording, 0
    until, ranks = starts[MAX_EVENTS], []
    for rank in recording.ranks:
        shown = (event for event in rank.events if event.start < until)
        events = tuple(event if event.end <= until else replace(event, end=inf) for event in shown)
        ranks.append(replace(rank, events=events))
    return replace(recording, ranks=tuple(ranks)), len(starts) - sum(len(rank.events) for rank in ranks)


MAX_WAITS, MAX_CHAINS = 5_000, 300
"""Numbers of waits, the longest, whose peers and whose chains of causes are on the page."""


def to_waits(recording: Recording, places: dict[Ref, int]) -> dict[str, object]:
    """The waits, the longest first, and the chains of the first of them."""
    waits = Waits(recording)
    longest, blamer = waits.longest(), Blamer(waits)
    return {
        "causes": CAUSES,
        "waits": [to_wait(wait, places) for wait in longest[:MAX_WAITS]],
        "chains": [to_chain(blamer.blame(wait), places) for wait in longest[:MAX_CHAINS]],
        "waitCount": len(longest),
        "noWaits": f"Waits {UNTOLD}" if recording.runs_ahead else "No rank waited",
    }


def to_wait(wait: WaitState, places: dict[Ref, int]) -> list[int | None]:
    """The event that waits, the one waited for on another rank, the cause, and nanoseconds until that one began."""
    peer = None if wait.peer is None else places[ref_of(wait.peer)]
    return [places[ref_of(wait.event)], peer, CAUSES.index(wait.cause), nanoseconds(wait.late)]


def to_chain(chain: Chain, places: dict[Ref, int]) -> list[object]:
    """The waits after the first; and the work that ends the chain: its event, from when to when, and whether that event
    is the work itself, or came after it."""
    busy = chain.busy
    waits = [to_wait(wait, places) for wait in chain.waits[1:]]
    if busy is None:
        return [waits]
    return [waits, places[ref_of(busy.event)], nanoseconds(busy.start), nanoseconds(busy.end), int(busy.is_recorded)]


MAX_NUMBERS = 10_000
"""Numbers on a page. Beyond them it shows shapes."""
NEVER = -1
"""The duration of an event that was not over when its rank was gone."""


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
    """The data of the page: of a very long recording, its beginning."""
    recording, later = beginning_of(recording)
    places = {ref_of(event): place for place, event in enumerate(recording.events())}
    lanes, vectors = Lanes(recording), Vectors()
    rows = [(rank, lane, top, lanes.heights[rank, lane]) for (rank, lane), top in lanes.tops.items()]
    return {
        "command": " ".join(recording.command),
        "backend": recording.backend,
        "versions": recording.versions,
        "began": datetime.fromtimestamp(recording.began, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **to_events(recording, lanes),
        "lanes": rows,
        "bar": ROW,
        "height": max((top + height for _, _, top, height in rows), default=0.0),
        "arrows": to_arrows(recording, places),
        "holdings": [[*held_by(rank, places, vectors)] for rank in recording.ranks],
        "valuesOf": [*values_of(recording, places, vectors)],
        "vectors": [*map(to_numbers, vectors.places)],
        "leftOut": len(vectors.left_out),
        "later": later,
        **to_waits(recording, places),
        "sources": [[source.file, source.line, source.function] for source in recording.sources],
        "texts": pack({source.file: recording.texts.get(source.file, "") for source in recording.sources}),
    }


def to_events(recording: Recording, lanes: Lanes) -> dict[str, object]:
    """The ranks with the columns of their events: times, logical times, parents and kinds."""
    steps = logical_times(recording)
    waited_for = Timeline(recording).waited_for
    whats: dict[tuple[object, ...], int] = {}
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
            what = what_of(event, lanes, ref_of(event) in waited_for)
            columns["what"].append(whats.setdefault(what, len(whats)))
            now, then = start, at
        about = {"rank": rank.rank, "host": rank.host, "device": rank.device, "dropped": rank.dropped}
        bound = nanoseconds(rank.clock_bound)
        ranks.append({**about, "cutOff": rank.is_cut_off, "bound": bound, "packed": pack(columns)})
    return {
        "end": max(0, nanoseconds(recording.end) - first),
        "steps": round(max(steps.values(), default=0)),
        "ranks": ranks,
        "whats": [*whats],
    }


def pack(thing: Mapping[str, object]) -> str:
    """Deflated JSON in base64, which browsers can inflate."""
    return base64.b64encode(zlib.compress(json.dumps(thing, separators=(",", ":")).encode(), 9)).decode()


def what_of(event: Event, lanes: Lanes, is_waited_for: bool) -> tuple[object, ...]:
    """The fields that repeated events have in common; the script has names for their places (run.js)."""
    is_bar = event.kind in SPANS + PIECES
    style, top = (style_of(event), lanes.top(event)) if is_bar else ("", 0.0)
    look = event.kind, event.name, event.lane, style, top
    return *look, int(is_waited_for), event.peer, event.nbytes, event.shape, event.source


def to_arrows(recording: Recording, places: dict[Ref, int]) -> list[int]:
    """For each message the place of its send, relative to the one before, and that of its receive relative to it."""
    arrows, last = list[int](), 0
    for message in match_messages(recording)[0]:
        sent, received = places[ref_of(message.send)], places[ref_of(message.receive)]
        arrows += [sent - last, received - sent]
        last = sent
    return arrows


def held_by(rank: RankRecording, places: dict[Ref, int], vectors: Vectors) -> Iterator[tuple[int, int, int | None]]:
    """The changes of what a rank holds: the event, whether at its end, and the vector.

    The vector is None where there was no room for it, and until the next one for which there is.
    """
    last: int | None = NEVER
    for change in holdings_of(rank):
        vector = vectors.add(change.values)
        if vector is not None or last is not None:
            yield places[ref_of(change.event)], int(change.at_end), vector
        last = vector


def values_of(recording: Recording, places: dict[Ref, int], vectors: Vectors) -> Iterator[tuple[int, int]]:
    """The places of events whose values are on the page, with those of their vectors."""
    for event in recording.events():
        if event.values is not None and (place := vectors.add(event.values)) is not None:
            yield places[ref_of(event)], place


def to_numbers(vector: Vector) -> list[float | int | str]:
    """Numbers as JSON, whole ones without a point. NaN and infinity become strings, as JavaScript reads them."""

    def to_number(value: float) -> float | int | str:
        if not isfinite(value):
            return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    return [*map(to_number, vector)]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


SCRIPTS = ("run", "format", "stage", "timeline", "ranks", "source", "waits", "player")
"""Parts of the script, each after those it uses."""


def render_page(recording: Recording) -> str:
    """The page as a file. It loads nothing, and its policy forbids the browser to load anything."""
    light, dark = css_variables({"paper": PAPER, "ink": INK, **STYLES})
    style = f":root{{{light};}}\n@media (prefers-color-scheme:dark){{:root{{{dark};}}}}\n" + read("page.css")
    script = '"use strict";\n' + "".join(read(f"script/{name}.js") for name in SCRIPTS)
    return Template(read("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(" ".join(recording.command)),
        style=style,
        script=script,
        data=to_json(to_columns(recording)),
    )


def to_json(data: object) -> str:
    """JSON for a script element: nothing in it can end the element, or begin a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def digest(text: str) -> str:
    """The source expression that allows exactly this style sheet or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
