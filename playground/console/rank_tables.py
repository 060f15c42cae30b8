"""What every rank had before and after a step: a table with a row for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playground.console.tables import RANK_COLUMN, Column, Table, cell
from playground.console.text import Prose, heading, prose, rank_number

MANY = 6
"""From so many columns on, what is the same on every rank is shown once, below the table."""
Outcome = Mapping[str, object]
"""What a step returned on a rank."""


def step_texts(name: str, about: str, returned: Sequence[object], says: str = "") -> list[str | Prose | Table]:
    """One step: what it does, then what every rank had before and after, and what each `says` about that."""
    ranks = [to_outcome(each) for each in returned]
    head = prose(heading(name), f": {about}")
    if refused := [rank["refused"] for rank in ranks if "refused" in rank]:
        return [head, f"  the backend refuses: {refused[0]}"]
    texts = [head, *rank_texts(ranks)]
    if says and ranks[0].keys() == {"before", "after"}:
        before, _, after = says.partition("{rank}")
        texts += [
            prose(before, rank_number(rank), after.format(rank=rank, **values)) for rank, values in enumerate(ranks)
        ]
    return texts


def rank_texts(ranks: Sequence[Outcome]) -> list[str | Prose | Table]:
    """One row per rank. What is the same on every rank, or is itself a table, stands below."""
    columns = [name for name in dict.fromkeys(name for values in ranks for name in values) if name != "rank"]
    common = {name: ranks[0][name] for name in columns if is_common(name, ranks)}
    below = {name: value for name, value in common.items() if len(columns) >= MANY or is_table(value)}
    if len(ranks) == 1:
        below = {name: value for name, value in below.items() if is_table(value)}
    columns = [name for name in columns if name not in below]
    table = Table(RANK_COLUMN, *(Column(name, wraps=True) for name in columns))
    for rank, values in enumerate(ranks):
        table.add(str(rank), *(cell(values.get(name)) for name in columns))
    texts: list[str | Prose | Table] = [table]
    for name, value in below.items():
        if isinstance(value, Mapping) and is_table(value):
            texts += [f"  {name}, on every rank:", pairs(value)]
        else:
            texts += [f"  {name}, on every rank: {cell(value)}"]
    return texts


def pairs(values: Mapping[str, object]) -> Table:
    """A row for each name and its value."""
    rows = [(f"  {name}", cell(value)) for name, value in values.items()]
    return Table(Column(""), Column("", wraps=True), rows=rows, headed=False)


def to_outcome(returned: object) -> Outcome:
    """What a step returned, by name: a dataclass as its fields."""
    return returned if isinstance(returned, Mapping) else vars(returned)


def is_common(name: str, ranks: Sequence[Outcome]) -> bool:
    """Whether every rank has this value, and the same one."""
    return all(name in values and values[name] == ranks[0].get(name) for values in ranks)


def is_table(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) > 1
