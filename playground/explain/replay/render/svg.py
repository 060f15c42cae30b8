"""Scenes as SVG: the same scene gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from playground.explain.replay.render.scene import (
    ARROW,
    BOX,
    CELL,
    INK,
    PAPER,
    STYLES,
    TEXT,
    TEXT_SIZE,
    Mark,
    Scene,
)

FONT = 'ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace'
TITLE_HEIGHT = 28
LINE = CELL.height
ARROWHEAD = (
    '<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto">'
    '<path class="head {name}" d="M0 0L8 4L0 8z"/></marker>'
)


def to_svg(scene: Scene) -> str:
    """The scene as an SVG file."""
    width = number(scene.width)
    bottom = TITLE_HEIGHT + scene.height
    height = number(bottom + (LINE * len(scene.caption) + 8 if scene.caption else 0))
    courses = courses_of(scene) if scene.period else {}
    arrows = sorted({css_name(mark.style) for mark in scene.marks if mark.kind == ARROW})
    lines = (mark_lines(mark, courses.get(course_of(mark))) for mark in scene.marks)
    marks = "".join(f"{line}\n" for of_mark in lines for line in of_mark)
    heights = (number(bottom + LINE * line + 12) for line in range(len(scene.caption)))
    caption = "".join(
        f'<text class="ink muted" x="8" y="{y}">{escape(text)}</text>\n'
        for y, text in zip(heights, scene.caption, strict=True)
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-labelledby="title desc">
<title id="title">{escape(scene.title)}</title>
<desc id="desc">{escape(" ".join([f"{scene.title}.", *scene.caption]))}</desc>
<style>{style_sheet(scene)}{moving_rules(courses, scene.period)}</style>
<defs>{"".join(ARROWHEAD.format(name=name) for name in arrows)}</defs>
<rect class="paper" width="{width}" height="{height}"/>
<text class="heading" x="8" y="18">{escape(scene.title)}</text>
<g transform="translate(0 {TITLE_HEIGHT})">
{marks}\
</g>
{caption}\
</svg>
"""


def style_sheet(scene: Scene) -> str:
    """CSS rules for the styles in this scene, with colours for light and for dark surroundings."""
    rules = [
        f"text{{font:{TEXT_SIZE}px {FONT};fill:var(--ink);dominant-baseline:central}}",
        ".heading{font-weight:bold;dominant-baseline:auto}",
        ".middle{text-anchor:middle}",
        ".end{text-anchor:end}",
        ".paper{fill:var(--paper)}",
        ".box,.bar,.lane{stroke:var(--line);stroke-width:1}",
        ".lane{stroke:none}",
        ".label{paint-order:stroke;stroke:var(--paper);stroke-width:4px}",
        ".arrow{fill:none;stroke-width:1.4}",
        ".meant{stroke-dasharray:4 3}",
        "text.muted{fill:var(--muted)}",
    ]
    used = sorted({mark.style for mark in scene.marks} | {"muted"})
    for name in map(css_name, used):
        rules.append(f".box.{name},.bar.{name},.lane.{name},.head.{name}{{fill:var(--{name})}}")
        rules.append(f".arrow.{name}{{stroke:var(--{name})}}text.in-{name}{{fill:var(--{name})}}")
    palette = {"paper": PAPER, "ink": INK, "line": STYLES["muted"]} | {
        style: STYLES[style] for style in used
    }
    light, dark = (
        ";".join(f"--{css_name(name)}:{colour[each]}" for name, colour in palette.items())
        for each in range(2)
    )
    colours = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return f"{colours}{''.join(rules)}"


def css_name(style: str) -> str:
    """The CSS class of a style."""
    return style.replace(" ", "-")


class Course(NamedTuple):
    """When a mark is there, and how far it travels meanwhile."""

    start: float
    end: float
    """Seconds."""
    travels: tuple[float, float]


def courses_of(scene: Scene) -> dict[Course, str]:
    """The CSS classes of the courses of marks that a moving scene does not show all the time."""
    courses = dict.fromkeys(course_of(mark) for mark in scene.marks)
    moving = (course for course in courses if course.start > 0 or course.end < scene.period)
    return {course: f"c{place}" for place, course in enumerate(moving)}


def course_of(mark: Mark) -> Course:
    return Course(mark.start, mark.end, mark.travels)


def moving_rules(courses: Mapping[Course, str], period: float) -> str:
    """CSS that shows marks in their time, and moves them. Readers who prefer less motion see the
    end."""
    if not courses:
        return ""
    frames, moving, hidden = [], [], []
    for (start, end, (right, down)), name in courses.items():
        begins, ends = (100 * min(moment, period) / period for moment in (start, end))
        here, to = "", ""
        if right or down:
            here = ";transform:none"
            to = f";transform:translate({number(right)}px,{number(down)}px)"
        before = "" if start <= 0 else f"0%,{begins - 0.01:.2f}%{{opacity:0}}"
        after = "" if end >= period else f"{ends + 0.01:.2f}%,100%{{opacity:0{to}}}"
        shown = f"{begins:.2f}%{{opacity:1{here}}}{ends:.2f}%{{opacity:1{to}}}"
        frames.append(f"@keyframes {name}{{{before}{shown}{after}}}")
        moving.append(f".{name}{{animation:{name} {period:g}s linear infinite}}")
        hidden += [f".{name}"] if after else []
    still = f"{','.join(hidden)}{{opacity:0}}" if hidden else ""
    return (
        f"{still}@media(prefers-reduced-motion:no-preference){{{''.join(moving)}}}{''.join(frames)}"
    )


def mark_lines(mark: Mark, course: str | None) -> Iterator[str]:
    """The elements of a mark, in a group with its title, its event and its course."""
    attributes = ""
    if mark.event:
        place = ":".join(map(str, mark.event))  # a rank, and a number there
        attributes = f' data-event="{place}"'
    if course:
        attributes += f' class="{course}"'
    title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
    name = css_name(mark.style)
    x, y, w, h = map(number, (mark.x, mark.y, mark.w, mark.h))
    classes = f"{mark.kind} {name}" + (" meant" if mark.meant else "")
    if attributes or title:
        yield f"<g{attributes}>{title}"
    if mark.kind == ARROW:
        yield f'<path class="{classes}" marker-end="url(#head-{name})" d="M{x} {y}l{w} {h}"/>'
        at = mark.label_at
        yield from text_lines(mark.text, mark.x + mark.w * at, mark.y + mark.h * at, "middle label")
    elif mark.kind == TEXT:
        colour = "" if mark.style == "plain" else f" in-{name}"
        yield from text_lines(mark.text, mark.x, mark.y, f"{mark.align}{colour}")
    else:
        yield (
            f'<rect class="{classes}" x="{x}" y="{y}" width="{w}" height="{h}" '
            f'rx="{4 * (mark.kind == BOX)}"/>'
        )
        yield from text_lines(mark.text, mark.x + mark.w / 2, mark.y + mark.h / 2, "middle")
    if attributes or title:
        yield "</g>"


def text_lines(text: str, x: float, y: float, classes: str) -> Iterator[str]:
    """The elements of a text of one or more lines, vertically centred at y."""
    lines = text.split("\n") if text else []
    for place, line in enumerate(lines):
        at = number(y + (place - (len(lines) - 1) / 2) * LINE)
        yield f'<text class={quoteattr(classes)} x="{number(x)}" y="{at}">{escape(line)}</text>'


def number(value: float) -> str:
    """A length, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
