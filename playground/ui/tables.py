"""Tables: columns with headings and units, rows of text. Does not import rich.

    COLUMNS = {
        "way": Column("algorithm"),
        **named_numbers(("sent", "sent", "bytes", ","), ("p95", "p95", "ms", ".2f", 1000)),
    }
    rows = [{"way": "ring", "sent": 48_000, "p95": 0.0003141}]  # shown as 48,000 and 0.31
    session.say(tabulate(rows, COLUMNS))

A table fits the terminal. Columns with `wide` are shown with --wide only; a line names them. If the
others do not fit, those with `wraps` become narrower, and the rightmost follow below, beside the
first column again. Rows that are printed one by one, as they become known, are those of
`Rows`: their rightmost columns are left out and named, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from playground.ui.text import RANK, Prose, Styled

CellText = str | Styled
GAP = 2
"""Spaces between two columns, and before the first."""
NARROWEST = 14
"""Columns with `wraps` become no narrower than this."""


@dataclass(frozen=True)
class Column:
    """How a column is headed, and how its cells are written."""

    heading: str
    unit: str = ""
    """Unit of all its numbers; shown below the heading, in parentheses."""
    format: str = ""
    """How `format` writes its numbers."""
    scale: float = 1
    """Factor from a value to what is shown: 1000 for seconds in ms, 100 for a share in %."""
    right: bool = False
    """Whether its cells are aligned to the right, as numbers are."""
    wide: bool = False
    """Whether it is shown with --wide only."""
    wraps: bool = False
    """Whether its cells may take several lines where the table would not fit otherwise."""
    width: int = 0
    """Least number of characters: needed where rows are printed one by one."""
    style: str = ""
    """Style of its cells, as rich names it."""

    @property
    def lines(self) -> list[str]:
        return [*self.heading.split("\n"), *([f"({self.unit})"] if self.unit else [])]

    @property
    def name(self) -> str:
        return " ".join(self.lines)

    def cell(self, value: object) -> CellText:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return format(value if self.scale == 1 else self.scale * value, self.format)
        return value if isinstance(value, Styled) else cell(value)


RANK_COLUMN = Column("rank", right=True, style=RANK)


def numbers(*specs: str | tuple[Any, ...]) -> list[Column]:
    """Columns of numbers, aligned to the right. One is given as its heading, or as a tuple of the
    heading, and the unit, format and scale of its numbers; what is left out at its end is as in
    `Column`."""
    columns = (Column(spec) if isinstance(spec, str) else Column(*spec) for spec in specs)
    return [replace(column, right=True) for column in columns]


def named_numbers(*specs: tuple[Any, ...], wide: bool = False) -> dict[str, Column]:
    """Columns of numbers, by the names of values in rows. A tuple is a name, and then what
    `numbers` takes; the heading is the name where nothing else is given."""
    columns = numbers(*(tuple(about) or name for name, *about in specs))
    return {
        name: replace(column, wide=wide) for (name, *_), column in zip(specs, columns, strict=True)
    }


class Table:
    """Columns and rows. A column of text may be given by its heading; `headed` says whether
    headings are shown."""

    def __init__(
        self, *columns: Column | str, rows: Iterable[Iterable[object]] = (), headed: bool = True
    ) -> None:
        self.columns = tuple(Column(each) if isinstance(each, str) else each for each in columns)
        self.headed = headed
        self.rows = list[tuple[CellText, ...]]()
        for row in rows:
            self.add(*row)

    def add(self, *values: object) -> None:
        """Add a row: a text, a number or None for each column, those for --wide included."""
        self.rows.append(
            tuple(column.cell(value) for column, value in zip(self.columns, values, strict=True))
        )


def tabulate(rows: Iterable[Any], columns: Mapping[str, Column]) -> Table:
    """A table of rows, which are values by name, or dataclasses, as the document has them: under
    the columns of these names, in their order."""
    records = [row if isinstance(row, Mapping) else vars(row) for row in rows]
    return Table(
        *columns.values(), rows=([record.get(name) for name in columns] for record in records)
    )


Text = str | Prose | Table
Texts = list[Text]
"""Pieces of text, printed one below the other."""


class Rows:
    """A table whose rows are said one by one. Which columns it has is decided once, by their
    `width`."""

    def __init__(self, say: Callable[..., None], *columns: Column) -> None:
        self.print = say
        self.columns = columns
        self.started = False

    def say(self, *values: object) -> None:
        self.print(Table(*self.columns, rows=[values], headed=not self.started))
        self.started = True


def cell(value: object) -> str:
    return "-" if value is None else str(value)


def fit(table: Table, natural: Sequence[int], available: int) -> list[list[int]]:
    """The positions of the columns without `wide` in rows that fit into `available` characters.
    Each begins with the first column, and the second where the first does not tell rows apart.
    `natural` is how wide each would like to be."""
    least = [
        GAP + (min(width, NARROWEST) if column.wraps else width)
        for column, width in zip(table.columns, natural, strict=True)
    ]
    first, *others = (i for i, column in enumerate(table.columns) if not column.wide)
    is_told = len({row[first] for row in table.rows}) == len(table.rows)
    keys = [first] if is_told else [first, *others[:1]]
    rows = [[first]]
    for i in others:
        if len(rows[-1]) > len(keys) and sum(least[j] for j in (*rows[-1], i)) > available:
            rows.append([*keys])
        rows[-1].append(i)
    return rows
