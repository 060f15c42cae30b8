"""A scene as SVG, with colours for light and for dark surroundings. The same scene gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from playground.see.paint.palette import INK, PAPER, STYLES
from playground.see.paint.scene import ARROW, BAR, BOX, CELL, LANE, TEXT, TEXT_SIZE, Mark, Scene

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
    return f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{''.join(rules)}{turn_rules(scene)}"


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


def mark_lines(mark: Mark, scene: Scene) -> Iterator[str]:
    """The elements of one mark, in a group that has its title and says which event it stands for."""
    event = f' data-event="{mark.event[0]}:{mark.event[1]}"' if mark.event else ""
    title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
    if event or title:
        yield f"<g{event}>{title}"
    turn = scene.turns.index(mark) if mark in scene.turns else None
    yield from shape_lines(mark, turn)
    if event or title:
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
