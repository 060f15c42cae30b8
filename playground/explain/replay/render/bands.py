"""Panels of rows of boxes, with what moves between the rows:

before   [ 1 ] [ 3 ] [ 5 ] [ 7 ]
           |  /  /  /
after    [16 ] [ 3 ] [ 5 ] [ 7 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from playground.explain.replay.render.scene import (
    ARROW,
    BOX,
    CELL,
    MARGIN,
    WIDTH,
    Mark,
    Scene,
    shorten,
)

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
        top = scene.bottom + (CELL.height if first else 0)
        for number, (name, bands) in enumerate(panels[first : first + columns]):
            add_panel(scene, name, bands, MARGIN + number * width, top, width - 2 * MARGIN)
    return scene.with_caption(*caption)


def bands_scene(title: str, bands: Sequence[Band], *caption: str) -> Scene:
    """The scene of one panel."""
    return panels_scene(title, [("", bands)], *caption, columns=1)


def add_panel(
    scene: Scene, title: str, bands: Sequence[Band], x: float, y: float, width: float
) -> None:
    """Add a panel whose upper left corner is at (x, y), `width` pixels wide."""
    if title:
        scene.write(shorten(title, width), x, y + CELL.height / 2)
        y += 2 * CELL.height
    label_width = max((len(band.label) for band in bands), default=0) * CELL.width
    label_width += MARGIN if label_width else 0
    above: list[tuple[float, float]] = []
    for band in bands:
        y += ROW_GAP if band.arrows else CELL.height if above else 0
        height = (2 + max(len(each.text.split("\n")) for each in band.boxes)) * CELL.height
        if band.label:
            scene.write(band.label, x, y + height / 2, style="muted")
        pitch = (width - label_width) / len(band.boxes)
        gap = min(CELL.width, pitch / 8)
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
