"""A scene: everything that a figure shows, laid out; and its colours.

Lengths are pixels, x to the right and y downwards. Texts are in a monospaced type of `TEXT_SIZE`:
their width is known without a font, as `CELL` is the room of one character.

Three layouts are shared by the figures: panels of rows of boxes, with what moves between the rows,

before   [ 1 ] [ 3 ] [ 5 ] [ 7 ]
           |  /  /  /
after    [16 ] [ 3 ] [ 5 ] [ 7 ]

horizontal bars of one or several pieces on a common scale, and a key to the colours.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from playground.explain.replay.analyse import Ref

Colour = tuple[str, str]
"""The colour of a style, in light and in dark surroundings: it fills boxes and bars, and draws
lines and texts."""
PAPER, INK = ("#ffffff", "#0d1117"), ("#1f2328", "#e6edf3")
"""The background, and the texts on it."""
STYLES: dict[str, Colour] = {
    "plain": ("#f0f3f6", "#262c36"),
    "muted": ("#59636e", "#9198a1"),
    "forward": ("#a8d4ff", "#0b4a8f"),
    "backward": ("#ffc680", "#8a4b08"),
    "optimizer": ("#aceebb", "#1a6b34"),
    "compute": ("#b6e3e9", "#14555f"),
    "communication": ("#dcc4ff", "#55299b"),
    "wait": ("#ffc9c5", "#8e1f19"),
    "phase": ("#e6eaef", "#31363f"),
    "value": ("#fff1a8", "#655300"),
    "message": ("#8250df", "#bc8cff"),
    "chunk": ("#cf222e", "#ff7b72"),
    "idle": ("#fafbfc", "#161b22"),
    "bucket 0": ("#a8d4ff", "#0b4a8f"),
    "bucket 1": ("#ffc680", "#8a4b08"),
    "bucket 2": ("#aceebb", "#1a6b34"),
    "bucket 3": ("#dcc4ff", "#55299b"),
}
BUCKETS = 4
"""Number of colours for buckets, which later buckets reuse."""
TEXT_SIZE = 12
CELL = (8, 16)
"""Width and height of a character, with the space around it."""
WIDTH = 640
"""Width of a scene."""
MARGIN = CELL[0]
BOX = "box"
LANE = "lane"
BAR = "bar"
ARROW = "arrow"
TEXT = "text"
"""A box has a border and a text in its middle. A lane is the time of one rank, in which bars lie. A
text begins, ends or has its middle at its position."""
FOREVER = float("inf")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
"""The learning rate in formulas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One element of a scene. Layouts place marks that are given in other units: see `box`, `arrow`
    and `piece`."""

    kind: str
    """`BOX`, `LANE`, `BAR`, `ARROW` or `TEXT`."""
    x: float = 0.0
    y: float = 0.0
    """The upper left corner; the beginning of an arrow; the `align` end of a text, in the middle of
    its line."""
    w: float = 0.0
    h: float = 0.0
    """Width and height. An arrow ends at (x + w, y + h), so both may be negative."""
    style: str = "plain"
    """A name in `STYLES`."""
    text: str = ""
    """The text on it, in one or more lines."""
    align: str = "middle"
    """Alignment of a text: start, middle or end."""
    label_at: float = 0.5
    """Position of an arrow's text, from 0 (its beginning) to 1 (its end)."""
    title: str = ""
    """A description, for screen readers and tooltips."""
    start: float = 0.0
    end: float = FOREVER
    """In a moving scene: the seconds in which it is there."""
    travels: tuple[float, float] = (0.0, 0.0)
    """In a moving scene: the distance it has gone, to the right and downwards, at its `end`."""
    meant: bool = False
    """Whether it was inferred, not recorded: drawn dashed."""
    event: Ref | None = None
    """The event that it shows."""


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """The time axis of a scene, to the right."""

    x: float
    start: float
    end: float
    """Seconds at `x`, and at `x + w`."""

    @property
    def w(self) -> float:
        """Its width: it ends at the right margin."""
        return WIDTH - self.x - MARGIN

    def at(self, seconds: float) -> float:
        """The x of a moment, clamped to the axis."""
        inside = min(max(seconds, self.start), self.end)
        return self.x + self.w * (inside - self.start) / ((self.end - self.start) or 1.0)


@dataclass
class Scene:
    """A drawing: marks are added from back to front, and from the top to the bottom."""

    title: str
    marks: list[Mark] = field(default_factory=list)
    caption: Sequence[str] = ()
    """Lines below it: what was run, and what to look at."""
    width: int = WIDTH
    """Pixels."""
    period: float = 0.0
    """Seconds after which a moving scene begins again; 0 for one that does not move."""

    def add(
        self, kind: str, x: float, y: float, w: float = 0.0, h: float = 0.0, **more: Any
    ) -> None:
        """Add a mark."""
        self.place(Mark(kind=kind, **more), x, y, w, h)

    def write(self, text: str, x: float, y: float, align: str = "start", **look: Any) -> None:
        """Add a text, its middle at this height."""
        self.add(TEXT, x, y, text=text, align=align, **look)

    def place(self, mark: Mark, x: float, y: float, w: float, h: float, **more: Any) -> None:
        """Add a mark here. Coordinates are rounded to tenths, so that the same recording gives the
        same bytes."""
        self.marks.append(
            replace(mark, x=round(x, 1), y=round(y, 1), w=round(w, 1), h=round(h, 1), **more)
        )

    def with_caption(self, *texts: str) -> Scene:
        """The scene, with these texts as its caption. Long lines are wrapped."""
        self.caption = [
            line for text in texts for line in textwrap.wrap(text, self.width // CELL[0] - 1)
        ]
        return self

    @property
    def bottom(self) -> float:
        """The y below all marks."""
        return max((max(mark.y, mark.y + mark.h) for mark in self.marks), default=0.0)

    @property
    def height(self) -> float:
        return self.bottom + CELL[1] / 2


def shorten(text: str, width: float) -> str:
    """The text, cut off with an ellipsis where it is wider than `width` pixels."""
    room = int(width // CELL[0])
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room > 1 else ""


ROW_GAP = 64
"""Pixels between two bands with arrows between them."""


def box(text: str, style: str = "plain", *, meant: bool = False) -> Mark:
    """A box of a band."""
    return Mark(kind=BOX, text=text, style=style, meant=meant)


def arrow(source: int, target: int, text: str = "", style: str = "message", **more: Any) -> Mark:
    """An arrow from a box of one band to a box of the next: x is the number of the first, x + w of
    the second."""
    return Mark(kind=ARROW, x=source, w=target - source, text=text, style=style, **more)


def meant_arrows(sources: Sequence[int], targets: Sequence[int]) -> list[Mark]:
    """Dashed arrows from all sources to all targets."""
    return [arrow(source, target, meant=True) for source in sources for target in targets]


@dataclass(frozen=True)
class Band:
    """Boxes beside each other."""

    boxes: Sequence[Mark]
    arrows: Sequence[Mark] = ()
    """Arrows from the band above to this one."""
    label: str = ""
    """The text to the left."""


Panel = tuple[str, Sequence[Band]]
"""Bands below each other, and their title."""


def panels_scene(title: str, panels: Sequence[Panel], *caption: str, columns: int = 2) -> Scene:
    """The scene of panels, `columns` beside each other, in reading order."""
    scene = Scene(title)
    width = (WIDTH - MARGIN) / columns
    for first in range(0, len(panels), columns):
        top = scene.bottom + (CELL[1] if first else 0)
        for number, (name, bands) in enumerate(panels[first : first + columns]):
            add_panel(scene, name, bands, MARGIN + number * width, top, width - 2 * MARGIN)
    return scene.with_caption(*caption)


def bands_scene(title: str, bands: Sequence[Band], *caption: str) -> Scene:
    """The scene of one panel."""
    return panels_scene(title, [("", bands)], *caption, columns=1)


def add_panel(
    scene: Scene, title: str, bands: Sequence[Band], x: float, y: float, width: float
) -> None:
    if title:
        scene.write(shorten(title, width), x, y + CELL[1] / 2)
        y += 2 * CELL[1]
    label_width = max((len(band.label) for band in bands), default=0) * CELL[0]
    label_width += MARGIN if label_width else 0
    above: list[tuple[float, float]] = []
    for band in bands:
        y += ROW_GAP if band.arrows else CELL[1] if above else 0
        height = (2 + max(len(each.text.split("\n")) for each in band.boxes)) * CELL[1]
        if band.label:
            scene.write(band.label, x, y + height / 2, style="muted")
        pitch = (width - label_width) / len(band.boxes)
        gap = min(CELL[0], pitch / 8)
        lefts = [x + label_width + number * pitch for number in range(len(band.boxes))]
        middles = [left + pitch / 2 for left in lefts]
        for left, each in zip(lefts, band.boxes, strict=True):
            scene.place(each, left + gap / 2, y, pitch - gap, height)
        for number, each in enumerate(band.arrows):
            (from_x, from_y), to_x = above[int(each.x)], middles[int(each.x + each.w)]
            label_at = (0.35, 0.65)[number % 2] if each.w else 0.5  # texts must not overlap
            more = {"label_at": label_at, "title": each.title or each.text}
            scene.place(each, from_x, from_y, to_x - from_x, y - from_y, **more)
        above = [(middle, y + height) for middle in middles]
        y += height


ROW = CELL[1]
"""Height of a row of bars in a lane."""
BAR_HEIGHT, BAR_PITCH = 2 * CELL[1], 3 * CELL[1]
LabelledBar = tuple[str, Sequence[Mark], str]
"""The text to its left, its pieces, and the text to its right."""


def piece(value: float, style: str, title: str, text: str = "") -> Mark:
    """A piece of a bar: w is its value. The text is written on it if there is room."""
    return Mark(kind=BAR, w=value, style=style, title=title, text=text)


def add_bars(scene: Scene, bars: Sequence[LabelledBar], most: float | None = None) -> None:
    """Add bars below each other. The full width is a value of `most`, by default that of the
    longest bar."""
    left = (2 + max(len(label) for label, _, _ in bars)) * CELL[0]
    right = WIDTH - (2 + max(len(note) for _, _, note in bars)) * CELL[0]
    scale = (right - left) / (
        most or max(sum(each.w for each in pieces) for _, pieces, _ in bars) or 1.0
    )
    y = scene.bottom + (CELL[1] if scene.marks else 0)
    for label, pieces, note in bars:
        scene.write(label, CELL[0], y + BAR_HEIGHT / 2)
        x = float(left)
        for each in pieces:
            width = each.w * scale
            text = each.text if len(each.text) * CELL[0] <= width else ""
            scene.place(each, x, y, width, BAR_HEIGHT, text=text)
            x += width
        scene.write(note, x + CELL[0], y + BAR_HEIGHT / 2, style="muted")
        y += BAR_PITCH


def add_lane(
    scene: Scene, name: str, x: float, y: float, height: float, title: str = "", **look: str
) -> None:
    """Add a lane from `x` to the right margin, and its name to the left, in this style."""
    scene.write(shorten(name, x - CELL[0]), CELL[0], y + height / 2, **look)
    scene.add(LANE, x, y, WIDTH - x - CELL[0], height, style="idle", title=title)


def bar(start: float, end: float, style: str, title: str) -> Mark:
    """A bar of a lane, between these seconds."""
    return Mark(kind=BAR, x=start, w=end - start, style=style, title=title)


def add_lanes(
    scene: Scene, title: str, axis: TimeAxis, lanes: Mapping[str, Iterable[Mark]]
) -> None:
    """Add a title, and below it lanes by their names, with bars of `bar`."""
    y = scene.bottom + (CELL[1] if scene.marks else 0)
    scene.write(title, CELL[0], y + CELL[1] / 2)
    for name, bars in lanes.items():
        y += 1.5 * ROW
        add_lane(scene, name, axis.x, y, ROW, style="muted")
        for each in bars:
            left, right = axis.at(each.x), axis.at(each.x + each.w)
            scene.place(each, left, y, max(right - left, 1), ROW)


def add_key(scene: Scene, meanings: dict[str, str]) -> None:
    """Add a key to the colours: texts by style, in lines."""
    x, y = float(CELL[0]), scene.bottom + 1.5 * CELL[1]
    for style, meaning in meanings.items():
        width = (len(meaning) + 5) * CELL[0]
        if x + width > WIDTH:
            x, y = float(CELL[0]), y + 2 * CELL[1]
        scene.add(BAR, x, y - CELL[1] / 2, 2 * CELL[0], CELL[1], style=style)
        scene.write(meaning, x + 3 * CELL[0], y, style="muted")
        x += width
