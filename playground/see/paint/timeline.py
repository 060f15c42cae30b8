"""The figure of any recording: ranks below each other, time to the right, each rank's events, and messages between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import playground.see.record as record
from playground.measurement import format_bytes
from playground.see.analyse import Lane, Message, Ref, match_messages, ref_of
from playground.see.paint import ARROW, BAR, CELL, TEXT, Scene, TimeAxis, add_key, add_lane, shorten
from playground.see.record import BACKGROUND, DEVICE, MAIN, Event, Recording

LABELS = 9 * CELL[0]
"""Width of the ranks' names, in pixels."""
ROW, LANE_GAP = CELL[1], 32
"""Height of a row of bars, and of the space for arrows below a rank's lanes."""
MOST_SPANS = 4
"""Rows of spans in a main thread's lane; below them is one row for the pieces."""
MOST_BARS, MOST_ARROWS = 400, 150
"""Limits that keep a figure readable and its file small."""
ALL = "a page (.html) has all"
STYLE_OF_KIND = {record.WAIT: "wait", record.PHASE: "phase"}
STYLE_OF_KIND |= dict.fromkeys((record.COLLECTIVE, record.BUCKET, record.MOVE), "communication")
STYLE_OF_NAME = {"forward": "forward", "backward": "backward", "step": "optimizer"}
SPANS, PIECES = (record.PHASE, record.COLLECTIVE, record.BUCKET), (record.COMPUTE, record.WAIT, record.MOVE)
"""Kinds that contain others, and kinds inside them: all that are drawn as bars, from back to front."""


@dataclass(frozen=True)
class Lanes:
    """Positions of the lanes."""

    tops: dict[Lane, float]
    heights: dict[Lane, float]
    rows: dict[Ref, int]
    """The row of each span in its lane."""

    def top(self, event: Event) -> float:
        """The top of an event's bar. A main thread's pieces have a row below its spans; in other lanes, where several
        threads may run at once, a piece lies in the row of its span."""
        lane = event.rank, event.lane
        if event.lane == MAIN and event.kind not in SPANS:
            return self.tops[lane] + self.heights[lane] - ROW
        span = ref_of(event) if event.kind in SPANS else (event.rank, event.parent)
        return self.tops[lane] + ROW * min(self.rows.get(span, 0), MOST_SPANS - 1)  # type: ignore[arg-type]


def lay_out(recording: Recording, title: str = "", *, unit: str = "") -> Scene:
    """The scene of a recording. With `unit`, times are in this unit, as from `to_logical_time`, not in seconds."""
    scene = Scene(title or " ".join(recording.command))
    start = min((event.start for event in recording.events()), default=0.0)
    axis = TimeAxis(x=LABELS, start=start, end=recording.end)
    lanes = add_lanes(scene, recording)
    notes = add_bars(scene, recording, axis, lanes)
    messages = match_messages(recording)[0]
    drawn: Sequence[Message] = messages
    if len(messages) > MOST_ARROWS:
        longest = sorted(messages, key=lambda message: message.send.start - message.receive.end)[:MOST_ARROWS]
        drawn = sorted(longest, key=lambda message: message.send.start)
        notes.append(f"{len(drawn)} of {len(messages)} messages are drawn, the longest; {ALL}.")
    for message in drawn:
        add_message(scene, message, axis, lanes)
    y = scene.bottom + CELL[1] / 2
    for at, align in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        seconds = (axis.end - axis.start) * at
        text = f"{unit} {seconds:g}" if unit else f"{seconds * 1e3:.4g} ms"
        scene.add(TEXT, axis.x + axis.w * at, y, text=text, align=align, style="muted")
    add_key(scene, {mark.style: mark.style for mark in scene.marks if mark.kind == BAR})
    return scene.with_caption(*caption_of(recording, notes))


def style_of(event: Event) -> str:
    """The style of an event's bar."""
    return STYLE_OF_KIND.get(event.kind) or STYLE_OF_NAME.get(event.name, "compute")


def add_lanes(scene: Scene, recording: Recording) -> Lanes:
    """Add a lane for each rank's main thread, and for each of its other lanes that is not empty."""
    rows = span_rows(recording)
    lanes = Lanes({}, lane_heights(recording, rows), rows)
    y = 0.0
    for rank in recording.ranks:
        title = f"rank {rank.rank} on {rank.host}, {rank.device}" + (" (cut off)" if rank.is_cut_off else "")
        for lane in (MAIN, BACKGROUND, DEVICE):
            height = lanes.heights.get((rank.rank, lane))
            if height is None:
                continue
            add_lane(scene, f"rank {rank.rank}" if lane == MAIN else lane, LABELS, y, height, title)
            lanes.tops[rank.rank, lane] = y
            y += height
        y += LANE_GAP
    return lanes


def lane_heights(recording: Recording, rows: dict[Ref, int]) -> dict[Lane, float]:
    """The heights of all main threads' lanes, which are equal, and of other lanes that are not empty."""
    used: dict[Lane, int] = defaultdict(int)
    for event in recording.events(*SPANS, *PIECES):
        used[event.rank, event.lane] = max(used[event.rank, event.lane], 1 + rows.get(ref_of(event), -1))
    most = max((count for (_, lane), count in used.items() if lane == MAIN), default=0)
    main = {(rank.rank, MAIN): float(ROW * (1 + min(MOST_SPANS, most))) for rank in recording.ranks}
    others = {at: float(ROW * max(1, min(MOST_SPANS, count))) for at, count in used.items() if at[1] != MAIN}
    return main | others


def span_rows(recording: Recording) -> dict[Ref, int]:
    """For every span, the first row that is free at that time: it is below the span that contains it."""
    rows: dict[Ref, int] = {}
    ends: dict[Lane, list[float]] = {}
    for event in recording.events(*SPANS):
        until = ends.setdefault((event.rank, event.lane), [])
        row = next((row for row, end in enumerate(until) if end <= event.start), len(until))
        until[row : row + 1] = [event.end]
        rows[ref_of(event)] = row
    return rows


def add_bars(scene: Scene, recording: Recording, axis: TimeAxis, lanes: Lanes) -> list[str]:
    """Add a bar for each event; those narrower than a pixel share bars. Returns notes on omissions."""
    short: dict[tuple[int, float], list[tuple[float, float, str, Event]]] = {}
    bars: list[tuple[float, float, Event]] = []
    for event in (*recording.events(*SPANS), *recording.events(*PIECES)):
        left, right = axis.at(event.start), axis.at(event.end)
        if right - left >= 1:
            bars.append((left, right, event))
        else:
            short.setdefault((event.rank, lanes.top(event)), []).append((left, right, style_of(event), event))
    for left, right, event in bars[:MOST_BARS]:
        add_bar(scene, event, left, right, lanes)
    groups = [group for row in short.values() for group in group_short(row)]
    for group in groups[: max(0, MOST_BARS - len(bars))]:
        add_group(scene, group, lanes)
    notes = []
    if len(bars) + len(groups) > MOST_BARS:
        notes.append(f"{MOST_BARS} of {len(bars) + len(groups)} bars are drawn; {ALL}.")
    if together := sum(len(group.events) for group in groups if len(group.events) > 1):
        notes.append(f"{together:,} events narrower than a pixel are drawn together with those beside them; {ALL}.")
    return notes


def add_group(scene: Scene, group: Cluster, lanes: Lanes) -> None:
    """Add the bar that short events share; the bar of a single one is its own."""
    first, left, count = group.events[0], group.left, len(group.events)
    if count == 1:
        add_bar(scene, first, left, left + 1, lanes)
        return
    title = f"rank {first.rank}: {count:,} short events, most of the time {group.style}"
    scene.add(BAR, left, lanes.top(first), max(group.right - left, 1), ROW, style=group.style, title=title)


def add_bar(scene: Scene, event: Event, left: float, right: float, lanes: Lanes) -> None:
    """Add the bar of an event, with its name where there is room."""
    width = right - left
    look = {"style": style_of(event), "text": shorten(event.name, width) if width > 3 * CELL[0] else ""}
    scene.add(BAR, left, lanes.top(event), width, ROW, **look, title=title_of(event), event=ref_of(event))


def title_of(event: Event) -> str:
    """A description of an event."""
    lasted = f"{event.seconds * 1e3:.3g} ms" if isfinite(event.end) else "not over"
    return f"rank {event.rank}: {event.name} ({event.kind}), {lasted}"


def add_message(scene: Scene, message: Message, axis: TimeAxis, lanes: Lanes) -> None:
    """Add an arrow from lane to lane, from the beginning of the send to the end of the receive."""
    send, receive = message.send, message.receive
    x, to_x = axis.at(send.start), axis.at(receive.end)
    y, to_y = lanes.tops[send.rank, MAIN], lanes.tops[receive.rank, MAIN]
    height = lanes.heights[send.rank, MAIN]
    y, to_y = (y + height, to_y) if to_y > y else (y, to_y + height)
    look = {"style": "message", "title": message_title(message), "event": ref_of(send)}
    scene.add(ARROW, x, y, to_x - x, to_y - y, **look)


def message_title(message: Message) -> str:
    """A description of a message, with its values, or its shape if they were not recorded."""
    send = message.send
    shape = f" of shape {shape_text(send.shape)}" if send.shape else ""
    values = shape if send.values is None else f": {format_values(send.values)}"
    return f"rank {send.rank} → rank {message.receive.rank}, {format_bytes(send.nbytes)}{values}"


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def format_values(values: Sequence[float], most: int = 4) -> str:
    """The first `most` numbers in brackets, whole ones without a point."""
    shown = ", ".join(f"{value:g}" for value in values[:most])
    return f"[{shown}, …]" if len(values) > most else f"[{shown}]"


def caption_of(recording: Recording, notes: Sequence[str]) -> list[str]:
    """Lines on what was run, and on what is not shown."""
    ranks = f"{recording.size} rank{'s' * (recording.size > 1)}"
    lines = [f"{' '.join(recording.command)}: {ranks} on {recording.backend}, recorded.", *notes]
    if dropped := sum(rank.dropped for rank in recording.ranks):
        lines.append(f"{dropped} events were dropped: there was no room for them.")
    if cut := [str(rank.rank) for rank in recording.ranks if rank.is_cut_off]:
        lines.append(f"Cut off before its end: rank {', '.join(cut)}.")
    return lines


STEP, TOUCH = 4, 1.0
"""Pixels within which short events are always drawn as one, and the widest gap between two that may be."""


@dataclass
class Cluster:
    """Short events beside each other."""

    left: float = inf
    right: float = -inf
    """Edges in pixels."""
    events: list[Event] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by style."""

    @property
    def style(self) -> str:
        """The style of most of the time; of equal ones, the first by name."""
        return min(self.seconds, key=lambda style: (-self.seconds[style], style))


def group_short(short: Iterable[tuple[float, float, str, Event]]) -> list[Cluster]:
    """Group the short events of a row, given with their edges and styles, into those that touch and look alike."""
    cells: dict[int, Cluster] = defaultdict(Cluster)
    for left, right, style, event in short:
        cell = cells[int(left // STEP)]
        cell.left, cell.right = min(left, cell.left), max(right, cell.right)
        cell.events.append(event)
        cell.seconds[style] += event.seconds
    groups: list[Cluster] = []
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
