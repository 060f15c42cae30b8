"""Panels of rows of boxes: what each of several places holds, and below it what it holds next, with what moves between.

before   [ 1 ] [ 3 ] [ 5 ] [ 7 ]
           |  /  /  /
after    [16 ] [ 3 ] [ 5 ] [ 7 ]

And horizontal bars, each of one piece or several, on a common scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.see.analyse.timeline import Ref
from playground.see.paint.scene import ARROW, BAR, BOX, CELL, FOREVER, TEXT, Drawing, shorten

GAP = 64
"""Pixels between two rows with arrows between them."""
MARGIN = CELL[0]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A box: a place, and what it holds."""

    text: str
    """One line or more."""
    style: str = "plain"
    title: str = ""
    start: float = 0.0
    event: Ref | None = None
    meant: bool = False


@dataclass(frozen=True, kw_only=True)
class Move:
    """An arrow from a place of one row to a place of the next."""

    source: int
    target: int
    text: str = ""
    title: str = ""
    style: str = "message"
    start: float = 0.0
    end: float = FOREVER
    event: Ref | None = None
    meant: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """Boxes beside each other."""

    label: str
    """What stands at their left; nothing if there is no room for it."""
    cells: Sequence[Cell]
    moves: Sequence[Move] = ()
    """Arrows from the row above to this one."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure, or a part of one."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    """Lines below it."""


def add_panels(drawing: Drawing, panels: Sequence[Panel], columns: int) -> None:
    """All panels, so many beside each other, in the order of reading."""
    width = (drawing.width - MARGIN) / columns
    for first in range(0, len(panels), columns):
        top = drawing.bottom + (CELL[1] if first else 0)
        for number, panel in enumerate(panels[first : first + columns]):
            add_panel(drawing, panel, MARGIN + number * width, top, width - 2 * MARGIN)


def add_panel(drawing: Drawing, panel: Panel, x: float, y: float, width: float) -> None:
    if panel.title:
        drawing.add(TEXT, x, y + CELL[1] / 2, text=shorten(panel.title, width), align="start")
        y += 2 * CELL[1]
    label_width = max((len(row.label) for row in panel.rows), default=0) * CELL[0]
    label_width += MARGIN if label_width else 0
    above: list[tuple[float, float]] = []
    for row in panel.rows:
        y += GAP if row.moves else CELL[1] if above else 0
        height = (2 + max(len(cell.text.split("\n")) for cell in row.cells)) * CELL[1]
        if row.label:
            drawing.add(TEXT, x, y + height / 2, text=row.label, align="start", style="muted")
        boxes = add_row(drawing, row, x + label_width, y, width - label_width, height)
        add_moves(drawing, row.moves, above, [(middle, y) for middle in boxes])
        above = [(middle, y + height) for middle in boxes]
        y += height
    for note in panel.notes:
        y += CELL[1]
        drawing.add(TEXT, x, y, text=shorten(note, width), align="start", style="muted")


def add_row(drawing: Drawing, row: Row, x: float, y: float, width: float, height: float) -> list[float]:
    """The boxes of a row. Where the middle of each is."""
    pitch = width / len(row.cells)
    gap = min(CELL[0], pitch / 8)
    middles = []
    for number, cell in enumerate(row.cells):
        left = x + number * pitch
        drawing.add(
            BOX, left + gap / 2, y, pitch - gap, height, style=cell.style, text=cell.text, title=cell.title,
            start=cell.start, event=cell.event, meant=cell.meant,
        )  # fmt: skip
        middles.append(left + pitch / 2)
    return middles


def add_moves(
    drawing: Drawing, moves: Sequence[Move], above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]]
) -> None:
    """Arrows. Those with a text have it at different heights, so that texts do not lie on each other."""
    for number, move in enumerate(moves):
        (x, y), (to_x, to_y) = above[move.source], below[move.target]
        drawing.add(
            ARROW, x, y, to_x - x, to_y - y, style=move.style, text=move.text, title=move.title or move.text,
            start=move.start, end=move.end, event=move.event, meant=move.meant,
            label_at=0.5 if move.source == move.target else (0.35, 0.65)[number % 2],
        )  # fmt: skip


HEIGHT, PITCH = 2 * CELL[1], 3 * CELL[1]
"""Of a bar, and from one to the next."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    value: float
    style: str
    text: str = ""
    """Written in it, if there is room."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar, what stands at its left and what at its right."""

    label: str
    pieces: Sequence[Piece]
    note: str = ""

    @property
    def total(self) -> float:
        return sum(piece.value for piece in self.pieces)


def add_bars(drawing: Drawing, bars: Sequence[Bar], most: float | None = None) -> None:
    """All bars below each other; `most` is what the full width stands for, by default the longest."""
    left = (2 + max(len(bar.label) for bar in bars)) * CELL[0]
    right = drawing.width - (2 + max(len(bar.note) for bar in bars)) * CELL[0]
    scale = (right - left) / (most or max(bar.total for bar in bars) or 1.0)
    top = drawing.bottom + (CELL[1] if drawing.marks else 0)
    for number, bar in enumerate(bars):
        y = top + number * PITCH
        drawing.add(TEXT, CELL[0], y + HEIGHT / 2, text=bar.label, align="start")
        x = float(left)
        for piece in bar.pieces:
            width = piece.value * scale
            title = piece.title or f"{bar.label}: {piece.text}"
            text = piece.text if len(piece.text) * CELL[0] <= width else ""
            drawing.add(BAR, x, y, width, HEIGHT, style=piece.style, text=text, title=title)
            x += width
        drawing.add(TEXT, x + CELL[0], y + HEIGHT / 2, text=bar.note, align="start", style="muted")


def add_key(drawing: Drawing, meanings: dict[str, str]) -> None:
    """What the colours stand for: texts by style, in lines."""
    x, y = float(CELL[0]), drawing.bottom + 1.5 * CELL[1]
    for style, meaning in meanings.items():
        width = (len(meaning) + 5) * CELL[0]
        if x + width > drawing.width:
            x, y = float(CELL[0]), y + 2 * CELL[1]
        drawing.add(BAR, x, y - CELL[1] / 2, 2 * CELL[0], CELL[1], style=style)
        drawing.add(TEXT, x + 3 * CELL[0], y, text=meaning, align="start", style="muted")
        x += width
