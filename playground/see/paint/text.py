"""A scene as text, a character for each of its cells: for terminals, and for those who read a page aloud."""

from __future__ import annotations

from playground.see.paint.palette import STYLES
from playground.see.paint.scene import ARROW, BAR, BOX, CELL, LANE, TEXT, Mark, Scene

SLOPES = {"recorded": "|-\\/", "meant": ":·˙˙"}
"""What a line is made of: down, across, down to the right, down to the left."""


def to_text(scene: Scene) -> str:
    """The whole page: its title, the scene, and its caption."""
    columns, rows = to_column(scene.width), round(scene.height / CELL[1]) + 1
    page = Page(columns, rows)
    for kinds in ((LANE,), (BAR, BOX), (ARROW,)):
        for mark in scene.marks:
            if mark.kind in kinds:
                page.paint(mark)
    for mark in scene.marks:  # what is written lies on top
        page.write_on(mark)
    return "\n".join([scene.title, "", *page.lines(), "", *scene.caption, ""])


def to_column(x: float) -> int:
    return int(x // CELL[0])


def to_row(y: float) -> int:
    return int(y // CELL[1])


class Page:
    """A rectangle of characters."""

    def __init__(self, columns: int, rows: int) -> None:
        self.cells = [[" "] * columns for _ in range(rows)]

    def lines(self) -> list[str]:
        """From the top to the bottom, without blanks at their ends."""
        return ["".join(row).rstrip() for row in self.cells]

    def put(self, column: int, row: int, character: str) -> None:
        """Whatever is outside is cut off."""
        if 0 <= row < len(self.cells) and 0 <= column < len(self.cells[row]):
            self.cells[row][column] = character

    def write(self, column: int, row: int, text: str) -> None:
        for number, character in enumerate(text):
            self.put(column + number, row, character)

    def paint(self, mark: Mark) -> None:
        if mark.kind == BAR:
            self.paint_bar(mark)
        elif mark.kind == BOX:
            self.paint_box(mark)
        elif mark.kind == ARROW:
            self.paint_arrow(mark)

    def paint_bar(self, mark: Mark) -> None:
        left, right = to_column(mark.x), max(to_column(mark.x) + 1, to_column(mark.x + mark.w))
        for row in range(to_row(mark.y), max(to_row(mark.y) + 1, to_row(mark.y + mark.h))):
            self.write(left, row, STYLES[mark.style].letter * (right - left))

    def paint_box(self, mark: Mark) -> None:
        left, right = to_column(mark.x), to_column(mark.x + mark.w - 1)
        top, bottom = to_row(mark.y), to_row(mark.y + mark.h - 1)
        for row in range(top, bottom + 1):
            self.write(left, row, " " * (right - left + 1))
            self.put(left, row, "[" if top == bottom else "|")
            self.put(right, row, "]" if top == bottom else "|")
        if bottom - top > len(mark.text.split("\n")):
            for row in (top, bottom):
                self.write(left, row, f"+{'-' * (right - left - 1)}+")

    def paint_arrow(self, mark: Mark) -> None:
        """A line of characters that say which way it goes, and its head."""
        from_column, from_row = to_column(mark.x), to_row(mark.y)
        across, down = to_column(mark.x + mark.w) - from_column, to_row(mark.y + mark.h) - from_row
        steps = max(abs(across), abs(down), 1)
        character = SLOPES["meant" if mark.meant else "recorded"][slope(across, down)]
        for step in range(steps + 1):
            at = step / steps
            self.put(from_column + round(across * at), from_row + round(down * at), character)
        flat = abs(across) > 4 * abs(down)
        head = (">" if across > 0 else "<") if flat else ("v" if down > 0 else "^")
        self.put(from_column + across, from_row + down, head)

    def write_on(self, mark: Mark) -> None:
        """The text of a mark, where the mark has it."""
        if not mark.text:
            return
        at = mark.label_at if mark.kind == ARROW else 0.0 if mark.kind == TEXT else 0.5
        x, y = mark.x + mark.w * at, mark.y + mark.h * at
        lines = mark.text.split("\n")
        if mark.kind == BAR:
            lines = [f" {line} " if len(line) + 2 <= mark.w // CELL[0] else line for line in lines]
        for number, line in enumerate(lines):
            row = to_row(y + (number - (len(lines) - 1) / 2) * CELL[1] + (0.1 if mark.kind == TEXT else 0.0))
            before = {"start": 0.0, "middle": len(line) / 2, "end": float(len(line))}[mark.align]
            self.write(round(x / CELL[0] - before), row, line)


def slope(across: int, down: int) -> int:
    """Which of `SLOPES`: cells are twice as high as wide."""
    if abs(across) <= abs(down) / 3:
        return 0
    if abs(down) * 4 <= abs(across):
        return 1
    return 2 if (across > 0) == (down > 0) else 3
