"""A profile as text, as a JSON document, and as a page with the program's source beside bars. Does
not import torch."""

from __future__ import annotations

import html
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from string import Template

from playground.base.files import LARGEST_PROGRAM
from playground.explain.cost.profile import Amounts, Place, Profile, Row
from playground.ui.session import to_document
from playground.ui.tables import RANK_COLUMN, Column, Texts, figures, tabulate
from playground.ui.units import format_seconds, plural

SHOWN = 12
"""Rows on the terminal."""
COSTS = figures(
    ("calls", "calls", "", ",.0f"),
    ("sent", "sent", "bytes", ",.0f"),
    ("waited", "waited", "ms", ",.1f", 1000),
    ("hidden", "hidden", "ms", ",.1f", 1000),
    ("share", "share", "%", ".1f", 100),
)
BY_LINE = {
    "where": Column("line"),
    "function": Column("in", wraps=True),
    "operation": Column("calls", wraps=True),
} | COSTS
BY_RANK = {"rank": RANK_COLUMN} | COSTS
MEANINGS = {
    "in C++": "in C++: torch makes these calls by itself, as DistributedDataParallel does.",
    "sent": "sent: bytes, of collectives by the formula of their algorithm.",
    "waited": "waited: in calls that block and in waits.",
    "hidden": (
        "hidden: the time of asynchronous calls during which the program did something else."
    ),
    "share": "share: waited, of the time that the program ran.",
}
LEGEND = " ".join(MEANINGS.values())


def profile_texts(profile: Profile) -> Texts:
    """The most expensive lines, the ranks, and the answer in one sentence."""
    rows = profile.rows
    shown = [
        vars(row.place) | {"where": row.place.where} | costs(row.total, profile.seconds)
        for row in rows[:SHOWN]
    ]
    ranks = [{"rank": rank.rank} | costs(rank.total, rank.seconds or 1.0) for rank in profile.ranks]
    more = f"and {plural(len(rows) - SHOWN, 'row')} more: --profile FILE.json has all"
    absent = {
        "hidden": not profile.total.hidden,
        "in C++": not any("in C++" in row.place.operation for row in rows[:SHOWN]),
    }
    by_line, by_rank = (
        {name: column for name, column in columns.items() if not absent.get(name)}
        for columns in (BY_LINE, BY_RANK)
    )
    return [
        "",
        f"Communication by line of the program, all {len(profile.ranks)} ranks together:",
        *([tabulate(shown, by_line)] if rows else []),
        *([more] if len(rows) > SHOWN else []),
        "",
        tabulate(ranks, by_rank),
        " ".join(text for name, text in MEANINGS.items() if not absent.get(name)),
        profile.conclude(),
    ]


def costs(amounts: Amounts, seconds: float) -> dict[str, object]:
    return vars(amounts) | {"share": amounts.waited / seconds}


def to_json(profile: Profile) -> str:
    """The document: totals, ranks, and all rows, the most expensive first. Times are seconds."""
    rows = [
        {
            **described(row.place),
            **costs(row.total, profile.seconds),
            "ranks": row.ranks,
        }
        for row in profile.rows
    ]
    ranks = [
        {"rank": rank.rank, "seconds": rank.seconds, **costs(rank.total, rank.seconds or 1.0)}
        for rank in profile.ranks
    ]
    return to_document(
        {
            "command": profile.command,
            "backend": profile.backend,
            "world_size": len(profile.ranks),
            "conclusion": profile.conclude(),
            **costs(profile.total, profile.seconds or 1.0),
            "ranks": ranks,
            "functions": by_function(profile),
            "rows": rows,
        }
    )


def described(place: Place) -> dict[str, object]:
    names = ("file", "line", "function", "operation")
    return {name: getattr(place, name) for name in names}


def by_function(profile: Profile) -> list[dict[str, object]]:
    """The totals of each function of the program, the most expensive first."""
    totals: defaultdict[tuple[str, str], Amounts] = defaultdict(Amounts)
    for row in profile.rows:
        totals[row.place.file, row.place.function] += row.total
    ordered = sorted(totals.items(), key=lambda each: (-each[1].waited, -each[1].sent))
    return [
        {"file": file, "function": function, **costs(total, profile.seconds)}
        for (file, function), total in ordered
    ]


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
