"""Horizontal bars of one or several pieces on a common scale, bars in lanes, and a key to the
colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from playground.explain.replay.render.scene import (
    BAR,
    CELL,
    LANE,
    WIDTH,
    Mark,
    Scene,
    TimeAxis,
    shorten,
)

ROW = CELL.height
"""Height of a row of bars in a lane."""
BAR_HEIGHT, BAR_PITCH = 2 * CELL.height, 3 * CELL.height
LabelledBar = tuple[str, Sequence[Mark], str]
"""The text to its left, its pieces, and the text to its right."""


def piece(value: float, style: str, title: str, text: str = "") -> Mark:
    """A piece of a bar: w is its value. The text is written on it if there is room."""
    return Mark(kind=BAR, w=value, style=style, title=title, text=text)


def add_bars(scene: Scene, bars: Sequence[LabelledBar], most: float | None = None) -> None:
    """Add bars below each other. The full width is a value of `most`, by default that of the
    longest bar."""
    left = (2 + max(len(label) for label, _, _ in bars)) * CELL.width
    right = WIDTH - (2 + max(len(note) for _, _, note in bars)) * CELL.width
    scale = (right - left) / (
        most or max(sum(each.w for each in pieces) for _, pieces, _ in bars) or 1.0
    )
    y = scene.bottom + (CELL.height if scene.marks else 0)
    for label, pieces, note in bars:
        scene.write(label, CELL.width, y + BAR_HEIGHT / 2)
        x = float(left)
        for each in pieces:
            width = each.w * scale
            text = each.text if len(each.text) * CELL.width <= width else ""
            scene.place(each, x, y, width, BAR_HEIGHT, text=text)
            x += width
        scene.write(note, x + CELL.width, y + BAR_HEIGHT / 2, style="muted")
        y += BAR_PITCH


def add_lane(
    scene: Scene, name: str, x: float, y: float, height: float, title: str = "", **look: str
) -> None:
    """Add a lane from `x` to the right margin, and its name to the left, in this style."""
    scene.write(shorten(name, x - CELL.width), CELL.width, y + height / 2, **look)
    scene.add(LANE, x, y, WIDTH - x - CELL.width, height, style="idle", title=title)


def bar(start: float, end: float, style: str, title: str) -> Mark:
    """A bar of a lane, between these seconds."""
    return Mark(kind=BAR, x=start, w=end - start, style=style, title=title)


def add_lanes(
    scene: Scene, title: str, axis: TimeAxis, lanes: Mapping[str, Iterable[Mark]]
) -> None:
    """Add a title, and below it lanes by their names, with bars of `bar`."""
    y = scene.bottom + (CELL.height if scene.marks else 0)
    scene.write(title, CELL.width, y + CELL.height / 2)
    for name, bars in lanes.items():
        y += 1.5 * ROW
        add_lane(scene, name, axis.x, y, ROW, style="muted")
        for each in bars:
            left, right = axis.at(each.x), axis.at(each.x + each.w)
            scene.place(each, left, y, max(right - left, 1), ROW)


def add_key(scene: Scene, meanings: dict[str, str]) -> None:
    """Add a key to the colours: texts by style, in lines."""
    x, y = float(CELL.width), scene.bottom + 1.5 * CELL.height
    for style, meaning in meanings.items():
        width = (len(meaning) + 5) * CELL.width
        if x + width > WIDTH:
            x, y = float(CELL.width), y + 2 * CELL.height
        scene.add(BAR, x, y - CELL.height / 2, 2 * CELL.width, CELL.height, style=style)
        scene.write(meaning, x + 3 * CELL.width, y, style="muted")
        x += width
