"""A scene as a picture in PNG, for where SVG cannot be shown. Drawn by Pillow, which torchvision brings."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

from playground.see.paint.palette import INK, PAPER, STYLES
from playground.see.paint.scene import ARROW, CELL, LANE, TEXT, TEXT_SIZE, Mark, Scene
from playground.see.paint.svg import TITLE_HEIGHT, total_height

SCALE = 2
"""Pixels per pixel of the scene, for screens that have so many."""
FONTS = ("DejaVuSansMono.ttf", "LiberationMono-Regular.ttf", "Menlo.ttc", "consola.ttf")
"""Monospaced fonts of Linux, macOS and Windows; the first that there is."""
DASH, GAP, HEAD = 4.0, 3.0, 6.0
ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def to_png(scene: Scene) -> bytes:
    """The whole file, in the colours for light surroundings."""
    from PIL import Image, ImageDraw

    size = (round(scene.width * SCALE), round(total_height(scene) * SCALE))
    image = Image.new("RGB", size, PAPER.light)
    painter = Painter(ImageDraw.Draw(image), load_font())
    painter.write(scene.title, 8, 14, "start")
    for mark in scene.marks:
        painter.paint(mark)
    for line, text in enumerate(scene.caption):
        painter.write(text, 8, TITLE_HEIGHT + scene.height + CELL[1] * line + 12, "start", STYLES["muted"].light)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def load_font() -> Any:
    """A monospaced font of this machine, or else Pillow's own."""
    from PIL import ImageFont

    for name in FONTS:
        try:
            return ImageFont.truetype(name, TEXT_SIZE * SCALE)
        except OSError:
            continue
    return ImageFont.load_default(TEXT_SIZE * SCALE)


class Painter:
    """Draws marks in pixels of the scene, below the title."""

    def __init__(self, draw: Any, font: Any) -> None:
        self.draw, self.font = draw, font

    def paint(self, mark: Mark) -> None:
        x, y = mark.x, mark.y + TITLE_HEIGHT
        colour = STYLES[mark.style].light
        if mark.kind == ARROW:
            self.paint_arrow(x, y, x + mark.w, y + mark.h, colour, mark.meant)
            self.write(mark.text, x + mark.w * mark.label_at, y + mark.h * mark.label_at, halo=True)
        elif mark.kind == TEXT:
            self.write(mark.text, x, y, mark.align, INK.light if mark.style == "plain" else colour)
        else:
            self.paint_rectangle(mark, x, y, colour)
            self.write(mark.text, x + mark.w / 2, y + mark.h / 2)

    def paint_rectangle(self, mark: Mark, x: float, y: float, colour: str) -> None:
        corners = [each * SCALE for each in (x, y, x + mark.w, y + mark.h)]
        border = None if mark.kind == LANE or mark.meant else STYLES["muted"].light
        self.draw.rectangle(corners, fill=colour, outline=border)
        if mark.meant:
            left, top, right, bottom = x, y, x + mark.w, y + mark.h
            for ends in ((left, top, right, top), (right, top, right, bottom), (right, bottom, left, bottom),
                         (left, bottom, left, top)):  # fmt: skip
                self.paint_line(*ends, STYLES["muted"].light, dashed=True)

    def paint_arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str, dashed: bool) -> None:
        self.paint_line(x, y, to_x, to_y, colour, dashed)
        angle = math.atan2(to_y - y, to_x - x)
        sides = [(to_x - HEAD * math.cos(angle + turn), to_y - HEAD * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
        self.draw.polygon([(a * SCALE, b * SCALE) for a, b in [(to_x, to_y), *sides]], fill=colour)

    def paint_line(self, x: float, y: float, to_x: float, to_y: float, colour: str, dashed: bool) -> None:
        length = math.hypot(to_x - x, to_y - y)
        piece, period = (DASH, DASH + GAP) if dashed else (length, length or 1.0)
        for begin in [period * each for each in range(max(1, math.ceil(length / period)))]:
            ends = [min(1.0, at / (length or 1.0)) for at in (begin, begin + piece)]
            points = [((x + (to_x - x) * at) * SCALE, (y + (to_y - y) * at) * SCALE) for at in ends]
            self.draw.line(points, fill=colour, width=SCALE)

    def write(
        self, text: str, x: float, y: float, align: str = "middle", colour: str = INK.light, halo: bool = False
    ) -> None:
        """A text of one or more lines, its middle at this height."""
        lines = text.split("\n") if text else []
        around = {"stroke_width": 2 * SCALE, "stroke_fill": PAPER.light} if halo else {}
        for line, part in enumerate(lines):
            at = (x * SCALE, (y + (line - (len(lines) - 1) / 2) * CELL[1]) * SCALE)
            self.draw.text(at, part, fill=colour, font=self.font, anchor=ANCHORS[align], **around)
