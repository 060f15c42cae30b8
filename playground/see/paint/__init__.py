"""A scene: everything that a figure shows, laid out once, so that all painters agree about it; and its colours.

Lengths are pixels, x to the right and y downwards. Texts are in a monospaced type of `TEXT_SIZE`: their width is known
without a font, as `CELL` is the room of one character. A scene that is `WIDTH` wide is 80 characters wide as text.

Three layouts are shared by the figures: panels of rows of boxes, with what moves between the rows,

before   [ 1 ] [ 3 ] [ 5 ] [ 7 ]
           |  /  /  /
after    [16 ] [ 3 ] [ 5 ] [ 7 ]

horizontal bars of one or several pieces on a common scale, and a key to the colours.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from playground.see.analyse import Ref


@dataclass(frozen=True)
class Colour:
    """The colour of a style: it fills boxes and bars, and draws lines and texts."""

    light: str
    dark: str
    letter: str
    """Fills a bar of this style where there are only letters."""


PAPER, INK = Colour("#ffffff", "#0d1117", " "), Colour("#1f2328", "#e6edf3", " ")
"""The background, and the texts on it."""
STYLES = {
    "plain": Colour("#f0f3f6", "#262c36", " "),
    "muted": Colour("#59636e", "#9198a1", "."),
    "forward": Colour("#a8d4ff", "#0b4a8f", "f"),
    "backward": Colour("#ffc680", "#8a4b08", "b"),
    "optimizer": Colour("#aceebb", "#1a6b34", "s"),
    "compute": Colour("#b6e3e9", "#14555f", "c"),
    "communication": Colour("#dcc4ff", "#55299b", "m"),
    "wait": Colour("#ffc9c5", "#8e1f19", "w"),
    "phase": Colour("#e6eaef", "#31363f", "-"),
    "value": Colour("#fff1a8", "#655300", " "),
    "message": Colour("#8250df", "#bc8cff", " "),
    "chunk": Colour("#cf222e", "#ff7b72", " "),
    "idle": Colour("#fafbfc", "#161b22", " "),
    "bucket 0": Colour("#a8d4ff", "#0b4a8f", "0"),
    "bucket 1": Colour("#ffc680", "#8a4b08", "1"),
    "bucket 2": Colour("#aceebb", "#1a6b34", "2"),
    "bucket 3": Colour("#dcc4ff", "#55299b", "3"),
}
BUCKETS = 4
"""Number of colours for buckets, which later buckets reuse."""
TEXT_SIZE = 12
CELL = (8, 16)
"""Width and height of a character, with the space around it."""
WIDTH = 640
"""Default width of a scene."""
MARGIN = CELL[0]
BOX, LANE, BAR, ARROW, TEXT = "box", "lane", "bar", "arrow", "text"
KINDS = (BOX, LANE, BAR, ARROW, TEXT)
"""A box has a border and a text in its middle. A lane is the time of one rank, in which bars lie. A text begins,
ends or has its middle at its position."""
FOREVER = float("inf")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
"""The learning rate in formulas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One element of a drawing."""

    kind: str
    """One of `KINDS`."""
    x: float
    y: float
    """The upper left corner; the beginning of an arrow; the `align` end of a text, in the middle of its line."""
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
    w: float
    start: float
    end: float
    """Seconds at `x`, and at `x + w`."""

    def at(self, seconds: float) -> float:
        """The x of a moment, clamped to the axis."""
        inside = min(max(seconds, self.start), self.end)
        return self.x + self.w * (inside - self.start) / ((self.end - self.start) or 1.0)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A finished drawing."""

    title: str
    caption: tuple[str, ...] = ()
    """Lines below it: what was run, and what to look at."""
    width: float = WIDTH
    height: float
    marks: tuple[Mark, ...]
    """From back to front."""
    takes_turns: bool = False
    """Whether its arrows show one thing on its way: where pictures move, they are lit in turn."""
    period: float = 0.0
    """Seconds after which a moving scene begins again; 0 for one that does not move."""

    @property
    def turns(self) -> list[Mark]:
        """The arrows that are lit in turn."""
        return [mark for mark in self.marks if mark.kind == ARROW and self.takes_turns]

    @property
    def at_end(self) -> tuple[Mark, ...]:
        """The marks of a still picture: those that are there when the period ends."""
        return tuple(mark for mark in self.marks if mark.end >= self.period)

    @property
    def description(self) -> str:
        """A description for screen readers."""
        return " ".join([self.title + ".", *self.caption])


@dataclass
class Drawing:
    """A scene in the making: marks are added from the top to the bottom."""

    title: str
    marks: list[Mark] = field(default_factory=list)
    width: float = WIDTH

    def add(self, kind: str, x: float, y: float, w: float = 0.0, h: float = 0.0, **more: object) -> None:
        """Add a mark. Coordinates are rounded to tenths, so that the same recording gives the same bytes."""
        where = {"x": round(x, 1), "y": round(y, 1), "w": round(w, 1), "h": round(h, 1)}
        self.marks.append(Mark(kind=kind, **where, **more))  # type: ignore[arg-type]

    @property
    def bottom(self) -> float:
        """The y below all marks."""
        return max((max(mark.y, mark.y + mark.h) for mark in self.marks), default=0.0)

    def scene(self, *caption: str) -> Scene:
        """The finished scene. Long lines of the caption are wrapped."""
        height, marks = self.bottom + CELL[1] / 2, tuple(self.marks)
        lines = (line for text in caption for line in textwrap.wrap(text, int(self.width // CELL[0]) - 1))
        return Scene(title=self.title, caption=tuple(lines), width=self.width, height=height, marks=marks)


def shorten(text: str, width: float) -> str:
    """The text, cut off with an ellipsis where it is wider than `width` pixels."""
    room = int(width // CELL[0])
    return text if len(text) <= room else text[: max(0, room - 1)] + "…" if room > 1 else ""


ROW_GAP = 64
"""Pixels between two rows with arrows between them."""


@dataclass(frozen=True)
class Cell:
    """A box in a row."""

    text: str
    style: str = "plain"
    meant: bool = False


@dataclass(frozen=True)
class Move:
    """An arrow from a cell of one row to a cell of the next."""

    source: int
    target: int
    text: str = ""
    title: str = ""
    style: str = "message"
    event: Ref | None = None
    meant: bool = False


def meant_moves(sources: Iterable[int], targets: Sequence[int]) -> list[Move]:
    """Dashed arrows from all sources to all targets."""
    return [Move(source, target, meant=True) for source in sources for target in targets]


@dataclass(frozen=True)
class Row:
    """Boxes beside each other."""

    cells: Sequence[Cell]
    moves: Sequence[Move] = ()
    """Arrows from the row above to this one."""
    label: str = ""
    """The text to the left."""


@dataclass(frozen=True)
class Panel:
    title: str
    rows: Sequence[Row]


def panels_drawing(title: str, panels: Sequence[Panel], columns: int) -> Drawing:
    """A drawing of panels, `columns` beside each other, in reading order."""
    drawing = Drawing(title)
    width = (drawing.width - MARGIN) / columns
    for first in range(0, len(panels), columns):
        top = drawing.bottom + (CELL[1] if first else 0)
        for number, panel in enumerate(panels[first : first + columns]):
            add_panel(drawing, panel, MARGIN + number * width, top, width - 2 * MARGIN)
    return drawing


def rows_scene(title: str, rows: Sequence[Row], *caption: str) -> Scene:
    """The scene of one panel."""
    return panels_drawing(title, [Panel("", rows)], columns=1).scene(*caption)


def add_panel(drawing: Drawing, panel: Panel, x: float, y: float, width: float) -> None:
    if panel.title:
        drawing.add(TEXT, x, y + CELL[1] / 2, text=shorten(panel.title, width), align="start")
        y += 2 * CELL[1]
    label_width = max((len(row.label) for row in panel.rows), default=0) * CELL[0]
    label_width += MARGIN if label_width else 0
    above: list[tuple[float, float]] = []
    for row in panel.rows:
        y += ROW_GAP if row.moves else CELL[1] if above else 0
        height = (2 + max(len(cell.text.split("\n")) for cell in row.cells)) * CELL[1]
        if row.label:
            drawing.add(TEXT, x, y + height / 2, text=row.label, align="start", style="muted")
        middles = add_cells(drawing, row.cells, x + label_width, y, width - label_width, height)
        for number, move in enumerate(row.moves):
            (from_x, from_y), to_x = above[move.source], middles[move.target]
            label_at = 0.5 if move.source == move.target else (0.35, 0.65)[number % 2]  # texts must not overlap
            look = {"style": move.style, "text": move.text, "title": move.title or move.text, "meant": move.meant}
            drawing.add(ARROW, from_x, from_y, to_x - from_x, y - from_y, label_at=label_at, event=move.event, **look)
        above = [(middle, y + height) for middle in middles]
        y += height


def add_cells(drawing: Drawing, cells: Sequence[Cell], x: float, y: float, width: float, height: float) -> list[float]:
    """Add the boxes of a row. Returns the x of each one's middle."""
    pitch = width / len(cells)
    gap = min(CELL[0], pitch / 8)
    for number, cell in enumerate(cells):
        left = x + number * pitch + gap / 2
        drawing.add(BOX, left, y, pitch - gap, height, style=cell.style, text=cell.text, meant=cell.meant)
    return [x + number * pitch + pitch / 2 for number in range(len(cells))]


BAR_HEIGHT, BAR_PITCH = 2 * CELL[1], 3 * CELL[1]


@dataclass(frozen=True)
class Piece:
    """A part of a bar."""

    value: float
    style: str
    title: str = ""
    text: str = ""
    """Written on it if there is room."""


@dataclass(frozen=True)
class Bar:
    """A bar, with a text to its left and one to its right."""

    label: str
    pieces: Sequence[Piece]
    note: str = ""


def add_bars(drawing: Drawing, bars: Sequence[Bar], most: float | None = None) -> None:
    """Add bars below each other. The full width is a value of `most`, by default that of the longest bar."""
    left = (2 + max(len(bar.label) for bar in bars)) * CELL[0]
    right = drawing.width - (2 + max(len(bar.note) for bar in bars)) * CELL[0]
    scale = (right - left) / (most or max(sum(piece.value for piece in bar.pieces) for bar in bars) or 1.0)
    y = drawing.bottom + (CELL[1] if drawing.marks else 0)
    for bar in bars:
        drawing.add(TEXT, CELL[0], y + BAR_HEIGHT / 2, text=bar.label, align="start")
        x = float(left)
        for piece in bar.pieces:
            width = piece.value * scale
            title = piece.title or f"{bar.label}: {piece.text}"
            text = piece.text if len(piece.text) * CELL[0] <= width else ""
            drawing.add(BAR, x, y, width, BAR_HEIGHT, style=piece.style, text=text, title=title)
            x += width
        drawing.add(TEXT, x + CELL[0], y + BAR_HEIGHT / 2, text=bar.note, align="start", style="muted")
        y += BAR_PITCH


def add_lane(drawing: Drawing, name: str, x: float, y: float, height: float, title: str = "") -> None:
    """Add a lane from `x` to the right margin, and its name to the left."""
    drawing.add(TEXT, CELL[0], y + height / 2, text=name, align="start")
    drawing.add(LANE, x, y, drawing.width - x - CELL[0], height, style="idle", title=title)


def add_key(drawing: Drawing, meanings: dict[str, str]) -> None:
    """Add a key to the colours: texts by style, in lines."""
    x, y = float(CELL[0]), drawing.bottom + 1.5 * CELL[1]
    for style, meaning in meanings.items():
        width = (len(meaning) + 5) * CELL[0]
        if x + width > drawing.width:
            x, y = float(CELL[0]), y + 2 * CELL[1]
        drawing.add(BAR, x, y - CELL[1] / 2, 2 * CELL[0], CELL[1], style=style)
        drawing.add(TEXT, x + 3 * CELL[0], y, text=meaning, align="start", style="muted")
        x += width
