"""What paints a scene: as SVG, as PNG, or as text, by the ending of the file. The same scene gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from playground.runtime.errors import UsageError
from playground.see.paint.scene import ARROW, BAR, BOX, CELL, INK, LANE, PAPER, STYLES, TEXT, TEXT_SIZE, Mark, Scene

FONT = 'ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace'
TITLE_HEIGHT = 28
LINE = CELL[1]
ARROWHEAD = (
    '<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head {name}" d="M0 0L8 4L0 8z"/></marker>'
)


def to_svg(scene: Scene) -> str:
    """The whole file."""
    width, height = number(scene.width), number(total_height(scene))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(scene.title)}</title>',
            f'<desc id="desc">{escape(scene.description)}</desc>',
            f"<style>{style_sheet(scene)}</style>",
            f"<defs>{''.join(ARROWHEAD.format(name=css_name(style)) for style in arrow_styles(scene))}</defs>",
            f'<rect class="paper" width="{width}" height="{height}"/>',
            f'<text class="heading" x="8" y="18">{escape(scene.title)}</text>',
            f'<g transform="translate(0 {TITLE_HEIGHT})">',
            *(line for mark in scene.marks for line in mark_lines(mark, scene)),
            "</g>",
            *caption_lines(scene),
            "</svg>\n",
        ]
    )


def total_height(scene: Scene) -> float:
    """With its title above and its caption below."""
    return TITLE_HEIGHT + scene.height + LINE * len(scene.caption) + (8 if scene.caption else 0)


def caption_lines(scene: Scene) -> Iterator[str]:
    for line, text in enumerate(scene.caption):
        y = TITLE_HEIGHT + scene.height + LINE * line + 12
        yield f'<text class="ink muted" x="8" y="{number(y)}">{escape(text)}</text>'


def style_sheet(scene: Scene) -> str:
    """Rules for the styles that this scene has: for light surroundings, then for dark ones."""
    rules = [
        f"text{{font:{TEXT_SIZE}px {FONT};fill:var(--ink);dominant-baseline:central}}"
        ".heading{font-weight:bold;dominant-baseline:auto}.middle{text-anchor:middle}.end{text-anchor:end}"
        ".paper{fill:var(--paper)}.box,.bar,.lane{stroke:var(--line);stroke-width:1}.lane{stroke:none}"
        ".label{paint-order:stroke;stroke:var(--paper);stroke-width:4px}"
        ".arrow{fill:none;stroke-width:1.4}.meant{stroke-dasharray:4 3}text.muted{fill:var(--muted)}"
    ]
    used = sorted({mark.style for mark in scene.marks} | {"muted"})
    for style in used:
        name = css_name(style)
        rules.append(f".box.{name},.bar.{name},.lane.{name},.head.{name}{{fill:var(--{name})}}")
        rules.append(f".arrow.{name}{{stroke:var(--{name})}}text.in-{name}{{fill:var(--{name})}}")
    light = variables({style: STYLES[style].light for style in used}, PAPER.light, INK.light, STYLES["muted"].light)
    dark = variables({style: STYLES[style].dark for style in used}, PAPER.dark, INK.dark, STYLES["muted"].dark)
    rules += [turn_rules(scene), moving_rules(scene)]
    return f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{''.join(rules)}"


def variables(styles: dict[str, str], paper: str, ink: str, line: str) -> str:
    own = ";".join(f"--{css_name(style)}:{colour}" for style, colour in styles.items())
    return f"--paper:{paper};--ink:{ink};--line:{line};{own}"


def css_name(style: str) -> str:
    """A style's class."""
    return style.replace(" ", "-")


def arrow_styles(scene: Scene) -> list[str]:
    return sorted({mark.style for mark in scene.marks if mark.kind == ARROW})


def turn_rules(scene: Scene) -> str:
    """What lights arrows in turn, a second each, for those who do not mind movement."""
    count = len(scene.turns)
    if not count:
        return ""
    lit = 100 / count
    delays = "".join(f".turn-{turn}{{animation-delay:{turn}s}}" for turn in range(count))
    return (
        f"@media(prefers-reduced-motion:no-preference){{.turn{{animation:lit {count}s linear infinite}}{delays}}}"
        f"@keyframes lit{{0%,{lit:.1f}%{{stroke-width:4}}{lit + 1:.1f}%,100%{{stroke-width:1.4}}}}"
    )


Course = tuple[float, float, tuple[float, float]]
"""The seconds between which a mark is there, and how far it travels meanwhile."""


def course_of(mark: Mark) -> Course:
    return mark.start, mark.end, mark.travels


def courses_of(scene: Scene) -> list[Course]:
    """The courses of marks that a moving scene does not show all the time."""
    if not scene.period:
        return []
    courses = dict.fromkeys(map(course_of, scene.marks))
    return [course for course in courses if course[0] > 0 or course[1] < scene.period]


def moving_rules(scene: Scene) -> str:
    """CSS rules that show marks in their time and let them travel. With reduced motion, the end is shown."""
    courses = courses_of(scene)
    if not courses:
        return ""
    frames, moving, hidden = [], [], []
    for place, (start, end, (right, down)) in enumerate(courses):
        begins, ends = (100 * min(moment, scene.period) / scene.period for moment in (start, end))
        travels = right or down
        here = ";transform:none" if travels else ""
        to = f";transform:translate({number(right)}px,{number(down)}px)" if travels else ""
        before = "" if start <= 0 else f"0%,{begins - 0.01:.2f}%{{opacity:0}}"
        after = "" if end >= scene.period else f"{ends + 0.01:.2f}%,100%{{opacity:0{to}}}"
        frames.append(
            f"@keyframes c{place}{{{before}{begins:.2f}%{{opacity:1{here}}}{ends:.2f}%{{opacity:1{to}}}{after}}}"
        )
        moving.append(f".c{place}{{animation:c{place} {scene.period:g}s linear infinite}}")
        hidden += [f".c{place}"] * bool(after)
    still = f"{','.join(hidden)}{{opacity:0}}" if hidden else ""
    return f"{still}@media(prefers-reduced-motion:no-preference){{{''.join(moving)}}}{''.join(frames)}"


def mark_lines(mark: Mark, scene: Scene) -> Iterator[str]:
    """The elements of one mark, in a group that has its title, its course, and says which event it stands for."""
    attributes = f' data-event="{mark.event[0]}:{mark.event[1]}"' if mark.event else ""
    courses = courses_of(scene)
    if course_of(mark) in courses:
        attributes += f' class="c{courses.index(course_of(mark))}"'
    title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
    if attributes or title:
        yield f"<g{attributes}>{title}"
    turn = scene.turns.index(mark) if mark in scene.turns else None
    yield from shape_lines(mark, turn)
    if attributes or title:
        yield "</g>"


def shape_lines(mark: Mark, turn: int | None) -> Iterator[str]:
    classes = f"{mark.kind} {css_name(mark.style)}" + (" meant" if mark.meant else "")
    classes += "" if turn is None else f" turn turn-{turn}"
    if mark.kind in (BOX, BAR, LANE):
        corner = 4 if mark.kind == BOX else 0
        yield (
            f'<rect class="{classes}" x="{number(mark.x)}" y="{number(mark.y)}" width="{number(mark.w)}" '
            f'height="{number(mark.h)}" rx="{corner}"/>'
        )
        yield from text_lines(mark.text, mark.x + mark.w / 2, mark.y + mark.h / 2, "middle")
    elif mark.kind == ARROW:
        yield (
            f'<path class="{classes}" marker-end="url(#head-{css_name(mark.style)})" '
            f'd="M{number(mark.x)} {number(mark.y)}l{number(mark.w)} {number(mark.h)}"/>'
        )
        at = mark.label_at
        yield from text_lines(mark.text, mark.x + mark.w * at, mark.y + mark.h * at, "middle label")
    elif mark.kind == TEXT:
        colour = "" if mark.style == "plain" else f" in-{css_name(mark.style)}"
        yield from text_lines(mark.text, mark.x, mark.y, f"{mark.align}{colour}")


def text_lines(text: str, x: float, y: float, classes: str) -> Iterator[str]:
    """A text of one or more lines, its middle at this height."""
    lines = text.split("\n") if text else []
    for line, part in enumerate(lines):
        at = y + (line - (len(lines) - 1) / 2) * LINE
        yield f'<text class={quoteattr(classes)} x="{number(x)}" y="{number(at)}">{escape(part)}</text>'


def number(value: float) -> str:
    """A length, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


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
    for mark in scene.at_end:
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
            for ends in (
                (left, top, right, top),
                (right, top, right, bottom),
                (right, bottom, left, bottom),
                (left, bottom, left, top),
            ):
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


SLOPES = {"recorded": "|-\\/", "meant": ":·˙˙"}
"""What a line is made of: down, across, down to the right, down to the left."""


def to_text(scene: Scene) -> str:
    """The whole page: its title, the scene, and its caption."""
    columns, rows = to_column(scene.width), round(scene.height / CELL[1]) + 1
    page = Page(columns, rows)
    for kinds in ((LANE,), (BAR, BOX), (ARROW,)):
        for mark in scene.at_end:
            if mark.kind in kinds:
                page.paint(mark)
    for mark in scene.at_end:  # what is written lies on top
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


SCENE_PAINTERS: dict[str, Callable[[Scene], str | bytes]] = {".svg": to_svg, ".png": to_png, ".txt": to_text}
"""What paints a scene, by the ending of the file."""


def paint_scene(scene: Scene, file: Path) -> None:
    """Paint a scene. Raises `UsageError` for an ending that no painter has, or a file that cannot be written."""
    check_ending(file, tuple(SCENE_PAINTERS))
    write(SCENE_PAINTERS[file.suffix](scene), file)


def check_ending(file: Path, endings: Sequence[str], flag: str = "") -> None:
    """Raise `UsageError` for an ending that nothing can be painted as."""
    if file.suffix not in endings:
        asked = f"{flag} {file}".strip()
        raise UsageError(f"{asked}: choose an ending from {', '.join(endings)}, it says what is painted")


def write(contents: str | bytes, file: Path) -> None:
    """Raises `UsageError` if it cannot be written."""
    try:
        file.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
