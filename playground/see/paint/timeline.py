"""The figure of any recording: ranks below each other, time to the right, what each does, and the messages between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

from playground.measurement.units import format_bytes
from playground.see.analyse.messages import Message, match_messages
from playground.see.analyse.timeline import Ref, ref_of
from playground.see.paint.rows import add_key
from playground.see.paint.scene import ARROW, BAR, CELL, LANE, TEXT, Drawing, Scene, TimeAxis, shorten
from playground.see.record.recording import (
    BACKGROUND,
    BUCKET,
    COLLECTIVE,
    COMPUTE,
    DEVICE,
    MAIN,
    MOVE,
    PHASE,
    WAIT,
    Event,
    RankRecording,
    Recording,
)

LABELS = 9 * CELL[0]
"""Where the ranks' names stand, in pixels from the left."""
ROW, LANE_GAP = CELL[1], 32
"""A row of bars, and what is free below a rank's lanes for arrows."""
MOST_SPANS = 4
"""Rows in a main thread's lane for what others lie in; below them is one for what lies in them."""
MOST_BARS, MOST_ARROWS = 400, 150
"""More would be neither readable nor a small file."""
ALL = "a page (.html) has all"
STYLE_OF_KIND = {
    COLLECTIVE: "communication",
    BUCKET: "communication",
    MOVE: "communication",
    WAIT: "wait",
    PHASE: "phase",
}
STYLE_OF_NAME = {"forward": "forward", "backward": "backward", "step": "optimizer"}
SPANS, PIECES = (PHASE, COLLECTIVE, BUCKET), (COMPUTE, WAIT, MOVE)
"""Kinds that others lie in, and those that lie in them: all that are bars, from back to front."""


@dataclass(frozen=True)
class Lanes:
    """Where the lanes are."""

    tops: dict[tuple[int, str], float]
    """Of each, by rank and name."""
    heights: dict[tuple[int, str], float]
    rows: dict[Ref, int]
    """Of each span: the row of its lane that it is in."""

    def bar(self, event: Event) -> tuple[float, float]:
        """The top and the height of an event's bar. A main thread has a row below its spans for what lies in them; of
        other threads, which may be several at once, it lies where its span does."""
        top = self.tops[event.rank, event.lane]
        if event.kind in SPANS:
            row = self.rows[ref_of(event)]
        elif event.lane == MAIN:
            return top + self.heights[event.rank, MAIN] - ROW, ROW
        else:
            row = 0 if event.parent is None else self.rows.get((event.rank, event.parent), 0)
        return top + ROW * min(row, MOST_SPANS - 1), ROW


def lay_out(recording: Recording, title: str = "", *, unit: str = "") -> Scene:
    """The scene of a recording. With `unit` its times are such units, and no seconds, as `to_logical_time` has it."""
    drawing = Drawing(title or " ".join(recording.command))
    start = min((event.start for event in recording.events()), default=0.0)
    axis = TimeAxis(x=LABELS, w=drawing.width - LABELS - CELL[0], start=start, end=recording.end)
    lanes = add_lanes(drawing, recording)
    notes = add_bars(drawing, recording, axis, lanes)
    messages = match_messages(recording).matched
    drawn = choose_messages(messages)
    for message in drawn:
        add_message(drawing, message, axis, lanes)
    add_ticks(drawing, axis, unit)
    add_key(drawing, {mark.style: mark.style for mark in drawing.marks if mark.kind == BAR})
    if len(drawn) < len(messages):
        notes.append(f"{len(drawn)} of {len(messages)} messages are drawn, the longest; {ALL}.")
    return drawing.scene(*caption_of(recording, notes), axis=axis)


def style_of(event: Event) -> str:
    """What its bar looks like."""
    return STYLE_OF_KIND.get(event.kind) or STYLE_OF_NAME.get(event.name, "compute")


def add_lanes(drawing: Drawing, recording: Recording) -> Lanes:
    """A lane for each rank's main thread, and for each other lane in which anything lies."""
    rows = span_rows(recording)
    lanes = Lanes({}, lane_heights(recording, rows), rows)
    y = 0.0
    for rank in recording.ranks:
        for lane in (MAIN, BACKGROUND, DEVICE):
            height = lanes.heights.get((rank.rank, lane))
            if height is None:
                continue
            name = f"rank {rank.rank}" if lane == MAIN else shorten(lane, LABELS - CELL[0])
            drawing.add(TEXT, CELL[0], y + height / 2, text=name, align="start")
            drawing.add(LANE, LABELS, y, drawing.width - LABELS - CELL[0], height, style="idle", title=name_of(rank))
            lanes.tops[rank.rank, lane] = y
            y += height
        y += LANE_GAP
    return lanes


def lane_heights(recording: Recording, rows: dict[Ref, int]) -> dict[tuple[int, str], float]:
    """By rank and lane. All main threads' lanes are equally high; of the others there are those in which anything
    lies."""
    used: dict[tuple[int, str], int] = {}
    for event in recording.events(*SPANS, *PIECES):
        lane = event.rank, event.lane
        used[lane] = max(used.get(lane, 0), 1 + rows.get(ref_of(event), -1))
    most = max((count for (_, lane), count in used.items() if lane == MAIN), default=0)
    main = {(rank.rank, MAIN): float(ROW * (1 + min(MOST_SPANS, most))) for rank in recording.ranks}
    others = {at: float(ROW * max(1, min(MOST_SPANS, count))) for at, count in used.items() if at[1] != MAIN}
    return main | others


def span_rows(recording: Recording) -> dict[Ref, int]:
    """Of every span the first row in which no other one lies at that time: it is below what it lies in."""
    rows: dict[Ref, int] = {}
    ends: dict[tuple[int, str], list[float]] = {}
    for event in recording.events(*SPANS):
        until = ends.setdefault((event.rank, event.lane), [])
        free = [row for row, end in enumerate(until) if end <= event.start]
        row = free[0] if free else len(until)
        until[row : row + 1] = [event.end]
        rows[ref_of(event)] = row
    return rows


def name_of(rank: RankRecording) -> str:
    """A rank, for screen readers."""
    return f"rank {rank.rank} on {rank.host}, {rank.device}" + (" (cut off)" if rank.is_cut_off else "")


def add_bars(drawing: Drawing, recording: Recording, axis: TimeAxis, lanes: Lanes) -> list[str]:
    """A bar for whatever takes time; for those that are narrower than a pixel, one together. What is not drawn so."""
    short: dict[tuple[int, float], list[tuple[float, float, str, Event]]] = {}
    bars: list[tuple[float, float, Event]] = []
    for event in (*recording.events(*SPANS), *recording.events(*PIECES)):
        left, right = axis.at(event.start), axis.at(event.end)
        if right - left >= 1:
            bars.append((left, right, event))
        else:
            short.setdefault((event.rank, lanes.bar(event)[0]), []).append((left, right, style_of(event), event))
    for left, right, event in bars[:MOST_BARS]:
        add_bar(drawing, event, left, right, lanes)
    groups = [group for row in short.values() for group in group_short(row)]
    for group in groups[: MOST_BARS - len(bars)] if len(bars) < MOST_BARS else []:
        add_group(drawing, group, lanes)
    notes = []
    if len(bars) + len(groups) > MOST_BARS:
        notes.append(f"{MOST_BARS} of {len(bars) + len(groups)} bars are drawn; {ALL}.")
    if together := sum(len(group.events) for group in groups if len(group.events) > 1):
        notes.append(f"{together:,} events narrower than a pixel are drawn together with those beside them; {ALL}.")
    return notes


def add_group(drawing: Drawing, group: Group, lanes: Lanes) -> None:
    """The bar of events that are too short for one each; of a single one, its own."""
    first = group.events[0]
    if len(group.events) == 1:
        add_bar(drawing, first, group.left, group.left + 1, lanes)
        return
    top, height = lanes.bar(first)
    drawing.add(
        BAR, group.left, top, max(group.right - group.left, 1), height, style=group.style,
        title=f"rank {first.rank}: {len(group.events):,} short events, most of the time {group.style}",
        start=min(event.start for event in group.events), end=max(event.end for event in group.events),
    )  # fmt: skip


def add_bar(drawing: Drawing, event: Event, left: float, right: float, lanes: Lanes) -> None:
    """The bar of an event, with its name where there is room."""
    top, height = lanes.bar(event)
    drawing.add(
        BAR, left, top, right - left, height, style=style_of(event),
        text=shorten(event.name, right - left) if right - left > 3 * CELL[0] else "",
        title=title_of(event), start=event.start, end=event.end, event=ref_of(event),
    )  # fmt: skip


def title_of(event: Event) -> str:
    """An event in words."""
    lasted = f"{event.seconds * 1e3:.3g} ms" if isfinite(event.end) else "not over"
    return f"rank {event.rank}: {event.name} ({event.kind}), {lasted}"


def choose_messages(messages: Sequence[Message]) -> list[Message]:
    """Those that are drawn: all, or those that were longest on their way."""
    if len(messages) <= MOST_ARROWS:
        return list(messages)
    longest = sorted(messages, key=lambda message: message.send.start - message.receive.end)
    return sorted(longest[:MOST_ARROWS], key=lambda message: message.send.start)


def add_message(drawing: Drawing, message: Message, axis: TimeAxis, lanes: Lanes) -> None:
    """From where it was sent to where it had arrived: to the right, and from lane to lane."""
    send, receive = message.send, message.receive
    x, to_x = axis.at(send.start), axis.at(receive.end)
    y, to_y = lanes.tops[send.rank, MAIN], lanes.tops[receive.rank, MAIN]
    height = lanes.heights[send.rank, MAIN]
    y, to_y = (y + height, to_y) if to_y > y else (y, to_y + height)
    drawing.add(
        ARROW, x, y, to_x - x, to_y - y, style="message", title=message_title(message), start=send.start,
        end=receive.end, event=ref_of(send),
    )  # fmt: skip


def message_title(message: Message) -> str:
    """A message in words: with what it carries, or how much if that is too large to be shown."""
    send = message.send
    shape = f" of shape {'x'.join(map(str, send.shape))}" if send.shape else ""
    values = shape if send.values is None else f": {format_values(send.values)}"
    return f"rank {send.rank} → rank {message.receive.rank}, {format_bytes(send.nbytes)}{values}"


def format_values(values: Sequence[float], most: int = 4) -> str:
    """Numbers in brackets, whole ones without a point; of many, the first."""
    shown = ", ".join(f"{value:g}" for value in values[:most])
    return f"[{shown}, …]" if len(values) > most else f"[{shown}]"


def add_ticks(drawing: Drawing, axis: TimeAxis, unit: str) -> None:
    """The beginning, the middle and the end of time."""
    y = drawing.bottom + CELL[1] / 2
    for at, align in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        seconds = (axis.end - axis.start) * at
        text = f"{unit} {seconds:g}" if unit else f"{seconds * 1e3:.4g} ms"
        drawing.add(TEXT, axis.x + axis.w * at, y, text=text, align=align, style="muted")


def caption_of(recording: Recording, notes: Sequence[str]) -> list[str]:
    """What was run, and what of it is not shown."""
    ranks = f"{recording.size} rank{'s' * (recording.size > 1)}"
    lines = [f"{' '.join(recording.command)}: {ranks} on {recording.backend}, recorded.", *notes]
    if dropped := sum(rank.dropped for rank in recording.ranks):
        lines.append(f"{dropped} events were dropped: there was no room for them.")
    cut = [str(rank.rank) for rank in recording.ranks if rank.is_cut_off]
    if cut:
        lines.append(f"Cut off before its end: rank {', '.join(cut)}.")
    return lines


STEP = 4
"""Pixels within which all are drawn as one."""
TOUCH = 1.0
"""Pixels between two that are drawn as one, at most."""


@dataclass
class Group:
    """Short events beside each other."""

    left: float
    right: float
    """Pixels."""
    events: list[Event] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By style."""

    @property
    def style(self) -> str:
        """What took most of the time; of several that took as much, the first by name."""
        return min(self.seconds, key=lambda style: (-self.seconds[style], style))

    def add(self, left: float, right: float, style: str, event: Event) -> None:
        self.left, self.right = min(left, self.left), max(right, self.right)
        self.events.append(event)
        self.seconds[style] += event.seconds


def group_short(short: Iterable[tuple[float, float, str, Event]]) -> list[Group]:
    """Of the events of one row, each with its left and right edge and its style: those that touch and look alike."""
    cells: dict[int, Group] = {}
    for left, right, style, event in short:
        cells.setdefault(int(left // STEP), Group(left, right)).add(left, right, style, event)
    groups: list[Group] = []
    for _, group in sorted(cells.items()):
        last = groups[-1] if groups else None
        if last and last.style == group.style and group.left <= last.right + TOUCH:
            last.right = max(last.right, group.right)
            last.events += group.events
            for style, seconds in group.seconds.items():
                last.seconds[style] += seconds
        else:
            groups.append(group)
    return groups
