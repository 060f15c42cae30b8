"""Snapshots as a table, and what they cost as another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from playground.console.tables import RANK_COLUMN, Cell, Column, Table
from playground.console.text import Prose, bad, good, prose
from playground.measurement.units import format_bytes, format_digits
from playground.tools.snapshots.results import SaveTimes, find_last_whole
from playground.training.snapshots.folder import DAMAGED, WHOLE, Examined

UNITS = ((86400, "days"), (3600, "h"), (60, "min"), (0, "s"))


def snapshots_table(snapshots: Sequence[Examined]) -> Table:
    """One row per snapshot, the oldest first."""
    table = Table(
        Column("step", right=True), Column("ranks", right=True), Column("size", right=True),
        Column("age", right=True), Column("condition", wraps=True),
    )  # fmt: skip
    now = time.time()
    for each in snapshots:
        age = None if each.written is None else format_age(now - each.written)
        table.add(f"{each.step:,}", str(each.size or "-"), format_bytes(each.nbytes), age or "-", condition_cell(each))
    return table


def condition_cell(snapshot: Examined) -> Cell:
    """Whether it is whole; if not, which file is to blame."""
    if snapshot.condition == WHOLE:
        return good(WHOLE)
    text = f"{snapshot.condition}: {'; '.join(snapshot.defects)}"
    return bad(text) if snapshot.condition == DAMAGED else text


def format_age(seconds: float) -> str:
    """In the largest unit of which two have passed: 90 s, 3 min, 47 h, 2 days. A clock that was set back makes no age
    negative."""
    length, unit = next(((length, unit) for length, unit in UNITS if seconds >= 2 * length), UNITS[-1])
    return f"{max(0, seconds) / (length or 1):.0f} {unit}"


def summary_text(snapshots: Sequence[Examined], *, read_contents: bool) -> Prose:
    """How many are whole, and how far they were looked at."""
    whole = sum(each.condition == WHOLE for each in snapshots)
    how = "every file read and its checksum compared" if read_contents else "lengths compared; verify compares contents"
    last = find_last_whole(snapshots)
    going_on = f"A run would go on from step {last.step:,}." if last else "No run can go on from here."
    return prose(f"Shown: {whole} of {len(snapshots)} snapshots are whole ({how}). {going_on}")


def times_table(times: Sequence[SaveTimes]) -> Table:
    """What the saves of each rank took: one row per rank."""
    table = Table(
        RANK_COLUMN, Column("blocked,\nfirst", "ms", right=True), Column("blocked,\nmedian", "ms", right=True),
        Column("on the disk,\nmedian", "ms", right=True),
    )  # fmt: skip
    for rank, each in enumerate(times):
        seconds = (each.blocked[0], median(each.blocked), median(each.written))
        table.add(str(rank), *(format_digits(1000 * value) for value in seconds))
    return table


def times_summary(times: Sequence[SaveTimes]) -> str:
    """The worst of all ranks and saves."""
    blocked, written = max(max(each.blocked) for each in times), max(max(each.written) for each in times)
    return (
        f"Shown: a save kept its rank for {1000 * blocked:.3g} ms at most; its files lay on the disk within "
        f"{1000 * written:.3g} ms."
    )
