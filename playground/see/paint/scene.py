"""A scene: everything a figure shows, laid out once, so that no two painters can disagree about it; and its colours.

Lengths are pixels, x to the right and y downwards. Texts are in a monospaced type of `TEXT_SIZE`, so that how wide they
are is known without a font: `CELL` is what a character, and a line, has room in. A scene that is `WIDTH` wide is 80
characters wide as text.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Colour:
    """What fills, or for lines and texts draws, a mark of some style."""

    light: str
    dark: str
    letter: str
    """What fills a bar of this style where there are only letters."""


PAPER, INK = Colour("#ffffff", "#0d1117", " "), Colour("#1f2328", "#e6edf3", " ")
"""The background, and whatever is written."""
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
"""Buckets with a colour of their own; those after them begin anew."""


def bucket_style(number: int) -> str:
    return f"bucket {number % BUCKETS}"


TEXT_SIZE = 12
CELL = (8, 16)
"""Width and height of a character, with the space around it."""
WIDTH = 640
"""Of a scene, in pixels."""
BOX, LANE, BAR, ARROW, TEXT = "box", "lane", "bar", "arrow", "text"
KINDS = (BOX, LANE, BAR, ARROW, TEXT)
"""A box has a border and its text in the middle. A lane is what happens in time to one rank, and bars lie in it. A text
begins, ends or has its middle at its place."""
FOREVER = float("inf")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
"""The learning rate, as formulas have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One thing that is drawn."""

    kind: str
    """One of `KINDS`."""
    x: float
    y: float
    """The upper left corner; where an arrow begins; of a text its `align` end, in the middle of its line."""
    w: float = 0.0
    h: float = 0.0
    """Width and height. An arrow ends at (x + w, y + h), so that for it they may be negative."""
    style: str = "plain"
    """Its colours: a name of `STYLES`."""
    text: str = ""
    """What is written on it, in one or more lines."""
    align: str = "middle"
    """Of a text: start, middle or end."""
    label_at: float = 0.5
    """Of an arrow: where its text stands, from 0 (its beginning) to 1 (its end)."""
    title: str = ""
    """What it is, in words: for screen readers, and to be shown where the mouse is."""
    start: float = 0.0
    end: float = FOREVER
    """Seconds of the recording in which it is lit; in a moving scene, seconds in which it is there."""
    travels: tuple[float, float] = (0.0, 0.0)
    """In a moving scene: how far it has gone, to the right and downwards, at its `end`."""
    meant: bool = False
    """Whether it was not recorded, but is what is meant to happen: drawn dashed."""
    event: tuple[int, int] | None = None
    """The event it stands for: its rank, and its number there."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"mark {self.kind!r}: one of {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """Where a moment is in a scene with time to the right."""

    x: float
    w: float
    start: float
    end: float
    """Seconds at `x`, and at `x + w`."""

    def at(self, seconds: float) -> float:
        """The x of a moment; the edge for one outside."""
        inside = min(max(seconds, self.start), self.end)
        return self.x + self.w * (inside - self.start) / ((self.end - self.start) or 1.0)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is drawn, from back to front."""

    title: str
    caption: tuple[str, ...] = ()
    """Lines that stand below it: what was run, and what to look at."""
    width: float = WIDTH
    height: float
    marks: tuple[Mark, ...]
    axis: TimeAxis | None = None
    """Where time goes to the right."""
    takes_turns: bool = False
    """Whether its arrows are one thing on its way: where pictures move, they are lit in turn, by their `start`."""
    period: float = 0.0
    """Seconds after which a moving scene begins again. 0 for one that does not move."""

    @property
    def turns(self) -> list[Mark]:
        """The arrows that are lit in turn."""
        arrows = (mark for mark in self.marks if mark.kind == ARROW)
        return sorted(arrows, key=lambda mark: mark.start) if self.takes_turns else []

    @property
    def at_end(self) -> tuple[Mark, ...]:
        """The marks that a picture which does not move has: those that are there when the period ends."""
        return tuple(mark for mark in self.marks if mark.end >= self.period)

    @property
    def description(self) -> str:
        """All of it in words, for those who do not see it."""
        return " ".join([self.title + ".", *self.caption])


@dataclass
class Drawing:
    """A scene in the making: marks are added from the top to the bottom."""

    title: str
    marks: list[Mark] = field(default_factory=list)
    width: float = WIDTH

    def add(self, kind: str, x: float, y: float, w: float = 0.0, h: float = 0.0, **more: object) -> Mark:
        """Add a mark. Coordinates are rounded to tenths, so that the same recording gives the same bytes."""
        numbers = {name: round(value, 1) for name, value in {"x": x, "y": y, "w": w, "h": h}.items()}
        mark = replace(Mark(kind=kind, **numbers), **more)  # type: ignore[arg-type]
        self.marks.append(mark)
        return mark

    @property
    def bottom(self) -> float:
        """Below everything that has been drawn."""
        return max((max(mark.y, mark.y + mark.h) for mark in self.marks), default=0.0)

    def scene(self, *caption: str, axis: TimeAxis | None = None) -> Scene:
        """The whole scene; the lines of its caption are broken where they are too long."""
        height = self.bottom + CELL[1] / 2
        lines = (line for text in caption for line in textwrap.wrap(text, int(self.width // CELL[0]) - 1))
        return Scene(
            title=self.title, caption=tuple(lines), width=self.width, height=height, marks=tuple(self.marks), axis=axis
        )


def shorten(text: str, width: float) -> str:
    """As much of one line as has room in so many pixels, with an ellipsis where something is missing."""
    room = int(width // CELL[0])
    return text if len(text) <= room else text[: max(0, room - 1)] + "…" if room > 1 else ""
