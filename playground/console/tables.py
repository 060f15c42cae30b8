"""Tables of text, and what every rank had before and after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDE = 6
"""From so many columns on, a table shows once, below it, what is the same on every rank."""


def table(rows: Sequence[Sequence[str]], first_right: int | None = None) -> list[str]:
    """Columns as wide as their widest cell, two spaces apart; those from `first_right` on stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if first_right is None else first_right
    lines = []
    for row in rows:
        cells = [*map(str.ljust, row[:left], widths[:left]), *map(str.rjust, row[left:], widths[left:])]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def cell(value: object) -> str:
    return "-" if value is None else str(value)


def step_text(name: str, about: str, ranks: Sequence[Mapping[str, object]], says: str = "") -> str:
    """One step: what it does, then what every rank had before and after, and what each `says` about that."""
    lines = [f"{name}: {about}"]
    if refused := [rank["refused"] for rank in ranks if "refused" in rank]:
        return "\n".join([*lines, f"  the backend refuses: {refused[0]}"])
    lines += rank_table(ranks)
    if says and ranks[0].keys() == {"before", "after"}:
        lines += [says.format(rank=rank, **values) for rank, values in enumerate(ranks)]
    return "\n".join(lines)


def rank_table(ranks: Sequence[Mapping[str, object]]) -> list[str]:
    """One row per rank. What is the same on every rank, or is itself a table, stands below."""
    columns = [name for name in ranks[0] if name != "rank"]
    common = {name: ranks[0][name] for name in columns if all(values[name] == ranks[0][name] for values in ranks)}
    below = {name: value for name, value in common.items() if len(columns) >= WIDE or is_table(value)}
    if len(ranks) == 1:
        below = {name: value for name, value in below.items() if is_table(value)}
    columns = [name for name in columns if name not in below]
    rows = [["rank", *columns]]
    rows += [[str(rank), *(cell(values[name]) for name in columns)] for rank, values in enumerate(ranks)]
    lines = table(rows)
    for name, value in below.items():
        if isinstance(value, Mapping) and is_table(value):
            lines += [f"  {name}, on every rank:", *(f"    {key:12}{cell(item)}" for key, item in value.items())]
        else:
            lines += [f"  {name}, on every rank: {cell(value)}"]
    return lines


def is_table(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) > 1
