"""The figure of any recording: ranks below each other, time to the right, each rank's events, and
messages between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest
from math import isfinite

import playground.explain.replay.record.recording as record
from playground.base.ranks import name_ranks
from playground.explain.replay.analyse.matching import MatchedMessage, match_messages
from playground.explain.replay.analyse.timeline import Lane, Ref, ref_of
from playground.explain.replay.record.recording import BACKGROUND, MAIN, Event, Recording
from playground.explain.replay.render.bars import ROW, add_key, add_lane
from playground.explain.replay.render.scene import ARROW, BAR, CELL, Scene, TimeAxis, shorten
from playground.ui.units import format_bytes, plural

LABELS = 9 * CELL.width
"""Width of the ranks' names, in pixels."""
LANE_GAP = 32
"""Height of the space for arrows below a rank's lanes."""
MOST_SPANS = 4
"""Rows of spans in a main thread's lane; below them is one row for the pieces."""
MOST_BARS, MOST_ARROWS = 400, 150
"""Limits that keep a figure readable and its file small."""
ALL = "a page (.html) has all"
SHOWN = 4
"""Numbers of a message that its title lists."""
STYLE_OF_KIND = {record.WAIT: "wait", record.PHASE: "phase"}
STYLE_OF_KIND |= dict.fromkeys(
    (record.COLLECTIVE, record.BUCKET, record.MOVE, record.SEND, record.RECEIVE), "communication"
)
STYLE_OF_NAME = {"forward": "forward", "backward": "backward", "step": "optimizer"}
SPANS = (record.PHASE, record.COLLECTIVE, record.BUCKET)
PIECES = (record.COMPUTE, record.WAIT, record.MOVE)
"""Kinds that contain others, and kinds inside them."""


def is_bar(event: Event) -> bool:
    """Whether an event is drawn as a bar. A message is an arrow, but for one end of it that was
    never over: no arrow says that its rank is in it."""
    is_unfinished = event.kind in (record.SEND, record.RECEIVE) and not isfinite(event.end)
    return event.kind in SPANS + PIECES or is_unfinished


def with_bars(recording: Recording) -> list[Event]:
    """The events that are drawn as bars, from back to front."""
    bars = filter(is_bar, recording.events())
    return sorted(bars, key=lambda event: event.kind not in SPANS)


class Lanes:
    """The lanes of a recording: one for each rank's main thread, and for each of its other lanes
    that is not empty. `gap`: pixels below a rank's lanes."""

    def __init__(self, recording: Recording, gap: int = LANE_GAP) -> None:
        self.rows: dict[Ref, int] = {}
        """For every span, the first row of its lane that is free at that time: below the span that
        contains it."""
        used: dict[Lane, int] = defaultdict(int)
        ends: dict[Lane, list[float]] = defaultdict(list)
        for event in with_bars(recording):
            lane, row = (event.rank, event.lane), 0
            if event.kind in SPANS:
                free = (row for row, end in enumerate(ends[lane]) if end <= event.start)
                # what lies lower is not drawn lower
                row = next(free, min(len(ends[lane]), MOST_SPANS))
                ends[lane][row : row + 1] = [event.end]
                self.rows[ref_of(event)] = row
                row += 1
            used[lane] = max(used[lane], row)
        most = max((rows for (_, lane), rows in used.items() if lane == MAIN), default=0)
        self.tops: dict[Lane, float] = {}
        self.heights: dict[Lane, float] = {}
        """All main threads' lanes are equally high."""
        y = 0.0
        for rank in recording.ranks:
            rows = {MAIN: 1 + min(MOST_SPANS, most)}
            if (lane := (rank.rank, BACKGROUND)) in used:
                rows[BACKGROUND] = max(1, min(MOST_SPANS, used[lane]))
            for name, count in rows.items():
                self.tops[rank.rank, name], self.heights[rank.rank, name] = y, float(ROW * count)
                y += ROW * count
            y += gap

    def top(self, event: Event) -> float:
        """The top of an event's bar. A main thread's pieces have a row below its spans; in other
        lanes, where several threads may run at once, a piece lies in the row of its span."""
        lane = event.rank, event.lane
        if event.lane == MAIN and event.kind not in SPANS:
            return self.tops[lane] + self.heights[lane] - ROW
        if event.kind in SPANS:
            row = self.rows.get(ref_of(event), 0)
        else:
            row = 0 if event.parent is None else self.rows.get((event.rank, event.parent), 0)
        return self.tops[lane] + ROW * min(row, MOST_SPANS - 1)


def lay_out(recording: Recording, title: str = "", *, unit: str = "") -> Scene:
    """The scene of a recording. With `unit`, times are in this unit, as from `to_logical_time`, not
    in seconds."""
    scene = Scene(title or " ".join(recording.command))
    axis = TimeAxis(x=LABELS, start=recording.start, end=recording.end)
    lanes = Lanes(recording)
    for rank in recording.ranks:
        about = f"rank {rank.rank} on {rank.device}" + (" (cut off)" if rank.is_cut_off else "")
        for (number, lane), top in lanes.tops.items():
            if number == rank.rank:
                name = f"rank {rank.rank}" if lane == MAIN else lane
                add_lane(scene, name, LABELS, top, lanes.heights[number, lane], about)
    notes = add_bars(scene, recording, axis, lanes)
    messages = drawn = match_messages(recording).matched
    if len(messages) > MOST_ARROWS:
        longest = nlargest(MOST_ARROWS, messages, lambda each: each.receive.end - each.send.start)
        drawn = sorted(longest, key=lambda message: message.send.start)
        notes.append(f"{len(drawn)} of {len(messages)} messages are drawn, the longest; {ALL}.")
    for message in drawn:
        add_message(scene, message, axis, lanes)
    y = scene.bottom + CELL.height / 2
    for at, align in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        seconds = (axis.end - axis.start) * at
        text = f"{unit} {seconds:g}" if unit else f"{seconds * 1e3:.4g} ms"
        scene.write(text, axis.x + axis.w * at, y, align, style="muted")
    add_key(scene, {mark.style: mark.style for mark in scene.marks if mark.kind == BAR})
    return scene.with_caption(*caption_of(recording, notes))


def style_of(event: Event) -> str:
    """The style of an event's bar."""
    return STYLE_OF_KIND.get(event.kind) or STYLE_OF_NAME.get(event.name, "compute")


def add_bars(scene: Scene, recording: Recording, axis: TimeAxis, lanes: Lanes) -> list[str]:
    """Add a bar for each event, at least a pixel wide, with its name where there is room. Returns
    notes on gaps."""
    events = with_bars(recording)
    longest = nlargest(MOST_BARS, events, lambda event: axis.at(event.end) - axis.at(event.start))
    drawn = {*map(ref_of, longest)}
    for event in (event for event in events if ref_of(event) in drawn):
        ref, left, top = ref_of(event), axis.at(event.start), lanes.top(event)
        width = max(axis.at(event.end) - left, 1)
        text = shorten(event.name, width) if width > 3 * CELL.width else ""
        look = {"style": style_of(event), "text": text, "title": title_of(event)}
        scene.add(BAR, left, top, width, ROW, **look, event=ref)
    if len(events) <= MOST_BARS:
        return []
    return [f"{MOST_BARS} of {len(events)} bars are drawn, the longest; {ALL}."]


def title_of(event: Event) -> str:
    """A description of an event."""
    lasted = f"{event.seconds * 1e3:.3g} ms" if isfinite(event.end) else "not over"
    return f"rank {event.rank}: {event.name} ({event.kind}), {lasted}"


def add_message(scene: Scene, message: MatchedMessage, axis: TimeAxis, lanes: Lanes) -> None:
    """Add an arrow from lane to lane, from the beginning of the send to the end of the receive."""
    send, receive = message.send, message.receive
    x, to_x = axis.at(send.start), axis.at(receive.end)
    y, to_y = lanes.tops[send.rank, MAIN], lanes.tops[receive.rank, MAIN]
    height = lanes.heights[send.rank, MAIN]
    y, to_y = (y + height, to_y) if to_y > y else (y, to_y + height)
    look = {"style": "message", "title": message_title(message), "event": ref_of(send)}
    scene.add(ARROW, x, y, to_x - x, to_y - y, **look)


def message_title(message: MatchedMessage) -> str:
    """A description of a message, with its values, or its shape if they were not recorded."""
    send = message.send
    shape = f" of shape {shape_text(send.shape)}" if send.shape else ""
    values = shape if send.values is None else f": {format_values(send.values)}"
    return f"rank {send.rank} → rank {message.receive.rank}, {format_bytes(send.nbytes)}{values}"


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def format_values(values: Sequence[float]) -> str:
    """The first `SHOWN` numbers in brackets, whole ones without a point."""
    shown = ", ".join(f"{value:g}" for value in values[:SHOWN])
    return f"[{shown}, …]" if len(values) > SHOWN else f"[{shown}]"


def caption_of(recording: Recording, notes: Sequence[str]) -> list[str]:
    """Lines on what was run, and on what is not shown."""
    ranks = plural(recording.size, "rank")
    lines = [f"{' '.join(recording.command)}: {ranks} on {recording.backend}, recorded.", *notes]
    if dropped := sum(rank.dropped for rank in recording.ranks):
        lines.append(f"{dropped} events were dropped: there was no room for them.")
    if cut := [rank.rank for rank in recording.ranks if rank.is_cut_off]:
        lines.append(f"Cut off before its end: {name_ranks(cut)}.")
    return lines
