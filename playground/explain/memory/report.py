"""The memory of GPUs as text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from playground.explain.memory.peaks import Peak, Row
from playground.ui.tables import Column, Texts, named_numbers, tabulate
from playground.ui.units import format_bytes, plural

SHOWN = 12
"""Rows on the terminal."""
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def memory_texts(peaks: Sequence[Peak]) -> Texts:
    """What was alive on the GPU that held most, or where something did not fit, and what the others
    held."""
    first = max(peaks, key=lambda peak: (peak.lacking > 0, peak.nbytes))
    others = [peak for peak in peaks if peak is not first]
    rest = first.rows[SHOWN:]
    more = f"and {plural(len(rest), 'row')} more: {format_bytes(sum(row.nbytes for row in rest))}"
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in first.by_kind().items())
    return [
        "",
        describe(first),
        tabulate(first.rows[:SHOWN], choose_columns(first.rows)),
        *([more] if rest else []),
        f"Together: {kinds}.",
        f"PyTorch has reserved {format_bytes(first.reserved)} of {format_bytes(first.capacity)}.",
        *([describe_others(others)] if others else []),
    ]


def choose_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """The table's columns; memory is in the largest unit of which one row has at least one."""
    most = max((row.nbytes for row in rows), default=0)
    unit, size = next((each for each in UNITS if most >= each[1]), UNITS[-1])
    digits = ",.1f" if size > 1 else ",.0f"
    return {"where": Column("line"), "kind": Column("kind")} | named_numbers(
        ("tensors", "tensors", "", ",.0f"), ("nbytes", "memory", unit, digits, 1 / size)
    )


def describe(peak: Peak) -> str:
    place = f"cuda:{peak.device} of rank {peak.rank}"
    if peak.lacking:
        return (
            f"{place} had no room for {format_bytes(peak.lacking)} more in {peak.where}. "
            f"Tensors of {format_bytes(peak.nbytes)} were alive:"
        )
    return f"{place} held most in {peak.where}: tensors of {format_bytes(peak.nbytes)} were alive:"


def describe_others(others: Sequence[Peak]) -> str:
    """One sentence."""
    least, most = (pick(peak.nbytes for peak in others) for pick in (min, max))
    held = format_bytes(most)
    if least != most:
        held = f"{format_bytes(least)} to {held}"
    if len(others) == 1:
        return f"cuda:{others[0].device} of rank {others[0].rank} held {held} at most."
    return f"The {len(others)} other GPUs held {held} at most."
