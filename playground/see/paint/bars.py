"""Horizontal bars, each of one piece or several, on a common scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.see.paint.scene import BAR, CELL, TEXT, Drawing

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
