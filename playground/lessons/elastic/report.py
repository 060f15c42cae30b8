"""What the failures cost, as text."""

from __future__ import annotations

from collections.abc import Sequence

from playground.console.tables import Column, Table
from playground.lessons.elastic.results import Recovery


def recoveries_table(recoveries: Sequence[Recovery]) -> Table:
    """A row per failure."""
    table = Table(
        Column("failure", wraps=True), Column("after\nstep", right=True), Column("goes on\nafter step", right=True),
        Column("steps\nredone", right=True), Column("until the\nnext step", "s", right=True),
    )  # fmt: skip
    for each in recoveries:
        table.add(
            each.failure, str(each.killed_after), str(each.resumed_after),
            str(each.killed_after - each.resumed_after), f"{each.seconds:.2f}",
        )  # fmt: skip
    return table
