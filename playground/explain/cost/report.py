"""A profile as text, and as a JSON document. Does not import torch."""

from __future__ import annotations

from collections import defaultdict

from playground.explain.cost.profile import Amounts, Place, Profile
from playground.ui.session import to_document
from playground.ui.tables import RANK_COLUMN, Column, Texts, named_numbers, tabulate
from playground.ui.units import plural

SHOWN = 12
"""Rows on the terminal."""
COSTS = named_numbers(
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
BY_RANK = {"rank": RANK_COLUMN} | named_numbers(("seconds", "ran", "s", ",.2f")) | COSTS
MEANINGS = {
    "in C++": "in C++: torch makes these calls by itself, as DistributedDataParallel does.",
    "sent": "sent: bytes, of collectives by the formula of their algorithm.",
    "waited": "waited: in calls that block and in waits.",
    "hidden": (
        "hidden: the time of asynchronous calls during which the program did something else."
    ),
    "share": "share: waited, of the time that the ranks ran.",
}
LEGEND = " ".join(MEANINGS.values())


def profile_texts(profile: Profile) -> Texts:
    """The most expensive lines, the ranks, and the answer."""
    rows = profile.rows
    shown = [
        vars(row.place) | {"where": row.place.where} | costs(row.total, profile.seconds)
        for row in rows[:SHOWN]
    ]
    ranks = [
        {"rank": rank.rank, "seconds": rank.seconds} | costs(rank.total, rank.seconds or 1.0)
        for rank in profile.ranks
    ]
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
        f"Communication by line of the program, all {len(profile.ranks)} ranks together, which "
        f"ran {profile.seconds:,.2f} s:",
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
