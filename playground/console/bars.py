"""Amounts by kind as bars of text: a row per thing, a run of one character per kind. Does not import rich.

session.say(*bars([("cpu:0", {"parameters": 8_000, "gradients": 8_000})], ("parameters", "gradients")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from playground.console.tables import Column, Table

BLOCKS = "█▓▒░#=+"
"""For so many kinds, in order. They differ without colours."""
WIDTH = 44
"""Characters of the longest bar."""
PER_LINE = 4
"""Kinds in a line of the legend."""


def bars(
    rows: Sequence[tuple[str, Mapping[str, int]]], kinds: Sequence[str], *, heading: str = "device", width: int = WIDTH
) -> list[str | Table]:
    """A bar per row, (name, {kind: bytes}), all on one scale, with its total; below, what the characters stand for.

    `kinds` are the names of all kinds, in the order in which bars are stacked: at most as many as `BLOCKS`.
    """
    longest = max((sum(amounts.values()) for _, amounts in rows), default=0)
    scale = f"one character: {longest / width:,.0f} bytes"
    table = Table(Column(heading), Column(scale), Column("total", "bytes", right=True))
    drawn = [draw([amounts.get(kind, 0) for kind in kinds], longest, width) for _, amounts in rows]
    for (name, amounts), bar in zip(rows, drawn, strict=True):
        table.add(name, bar, f"{sum(amounts.values()):,}")
    seen = [f"{block} {kind}" for block, kind in zip(BLOCKS, kinds, strict=False) if any(block in bar for bar in drawn)]
    return [table, *(f"  {'   '.join(seen[start : start + PER_LINE])}" for start in range(0, len(seen), PER_LINE))]


def draw(amounts: Sequence[int], longest: int, width: int) -> str:
    """`amounts` one after another, on a scale on which `longest` is `width` characters.

    Each boundary is rounded by itself, so that a bar is as long as its sum says; what is small may not be seen.
    """
    ends = [round(total * width / longest) if longest else 0 for total in accumulate(amounts)]
    lengths = (end - start for start, end in zip([0, *ends], ends, strict=False))
    return "".join(block * length for block, length in zip(BLOCKS, lengths, strict=False))
