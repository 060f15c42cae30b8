"""A profile as a page, with the program's source beside bars. Does not import torch."""

from __future__ import annotations

import html
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from string import Template

from playground.base.files import LARGEST_PROGRAM
from playground.explain.cost.profile import Amounts, Profile, Row
from playground.explain.cost.report import LEGEND, to_json
from playground.ui.units import format_seconds

PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def to_page(profile: Profile) -> str:
    """A page without scripts and requests."""
    title = shlex.join(("playground", *profile.command))
    return PAGE.substitute(
        title=html.escape(title),
        answer=html.escape(profile.conclude()),
        tables="\n".join(to_tables(profile)),
        sources="\n".join(to_sources(profile)),
        legend=html.escape(LEGEND),
    )


def to_tables(profile: Profile) -> Iterator[str]:
    rows = [
        [row.place.where, row.place.function, row.place.operation, *figures_of(row.total, profile)]
        for row in profile.rows
    ]
    yield "<h2>By line</h2>" + to_table(["line", "in", "calls"], rows)
    ranks = [
        [str(rank.rank), *figures_of(rank.total, profile, rank.seconds)] for rank in profile.ranks
    ]
    yield "<h2>By rank</h2>" + to_table(["rank"], ranks)


def figures_of(amounts: Amounts, profile: Profile, seconds: float | None = None) -> list[str]:
    share = amounts.waited / (seconds or profile.seconds or 1.0)
    return [
        f"{amounts.calls:,.0f}",
        f"{amounts.sent:,.0f}",
        format_seconds(amounts.waited) if amounts.waited else "",
        format_seconds(amounts.hidden) if amounts.hidden else "",
        f"{share:.1%}",
    ]


def to_table(names: list[str], rows: Iterable[list[str]]) -> str:
    """A table whose first columns have these names, and the others numbers."""
    numbers = ["calls", "bytes sent", "waited", "hidden", "share"]
    head = [f"<th>{name}</th>" for name in names]
    head += [f'<th class="number">{name}</th>' for name in numbers]
    lines = []
    for row in rows:
        cells = [f"<td>{html.escape(cell)}</td>" for cell in row[: len(names)]]
        cells += [f'<td class="number">{cell}</td>' for cell in row[len(names) :]]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{"".join(head)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def to_sources(profile: Profile) -> Iterator[str]:
    """The program's files, each line with what it costs."""
    files: dict[str, list[Row]] = {}
    for row in profile.rows:
        files.setdefault(row.place.path, []).append(row)
    for path, rows in files.items():
        text = read_text(path)
        if text is not None:
            yield to_source(rows[0].place.file, text.splitlines(), rows, profile)


def read_text(path: str) -> str | None:
    """The text of a program's file, if it is there."""
    try:
        file = Path(path)
        if not path or file.stat().st_size > LARGEST_PROGRAM:
            return None
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def to_source(name: str, lines: list[str], rows: list[Row], profile: Profile) -> str:
    totals: defaultdict[int, Amounts] = defaultdict(Amounts)
    for row in rows:
        totals[row.place.line] += row.total
    most = max((total.waited for total in totals.values()), default=0.0) or 1.0
    shown = []
    for number, line in enumerate(lines, 1):
        bar = waited = sent = mark = ""
        if total := totals.get(number):
            mark = ' class="costs"'
            bar = f'<div style="width:{100 * total.waited / most:.1f}%"></div>'
            waited, sent = f"{profile.share(total):.1%}", f"{total.sent:,.0f} B"
        shown.append(
            f'<tr{mark}><td class="bar">{bar}</td><td class="number">{waited}</td>'
            f'<td class="number">{sent}</td><td class="line">{number}</td>'
            f'<td class="code">{html.escape(line)}</td></tr>'
        )
    head = (
        '<tr><th>waited</th><th class="number">share</th><th class="number">sent</th><th></th>'
        "<th></th></tr>"
    )
    return (
        f"<h2>{html.escape(name)}</h2>"
        f'<div class="wide"><table class="source">{head}{"".join(shown)}</table></div>'
    )


RENDERERS: dict[str, Callable[[Profile], str]] = {
    ".json": lambda profile: to_json(profile) + "\n",
    ".html": to_page,
}
"""By the ending of a file, what a profile is written as."""
