"""A scene: everything that a figure shows, laid out; and its colours.

Lengths are pixels, x to the right and y downwards. Texts are in a monospaced type of `TEXT_SIZE`:
their width is known without a font, as `CELL` is the room of one character.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from playground.explain.replay.analyse.timeline import Ref

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
}
STYLES_OF_BUCKETS = "forward", "backward", "optimizer", "communication"
"""The styles whose colours DDP's buckets have, one after another."""
STYLES |= {f"bucket {number}": STYLES[style] for number, style in enumerate(STYLES_OF_BUCKETS)}
BUCKETS = len(STYLES_OF_BUCKETS)
"""Number of colours for buckets, which later buckets reuse."""
TEXT_SIZE = 12


class Size(NamedTuple):
    """In pixels."""

    width: float
    height: float


CELL = Size(8, 16)
"""A character, with the space around it."""
WIDTH = 640
"""Width of a scene."""
MARGIN = CELL.width
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
        columns = int(self.width // CELL.width) - 1
        self.caption = [line for text in texts for line in textwrap.wrap(text, columns)]
        return self

    @property
    def bottom(self) -> float:
        """The y below all marks."""
        return max((max(mark.y, mark.y + mark.h) for mark in self.marks), default=0.0)

    @property
    def height(self) -> float:
        return self.bottom + CELL.height / 2


def shorten(text: str, width: float) -> str:
    """The text, cut off with an ellipsis where it is wider than `width` pixels."""
    room = int(width // CELL.width)
    if len(text) <= room:
        return text
    return text[: room - 1] + "…" if room > 1 else ""
