"""Tables: columns with headings and units, rows of text. Does not import rich.

    COLUMNS = {
        "way": Column("algorithm"),
        **figures(("sent", "sent", "bytes", ","), ("p95", "p95", "ms", ".2f", 1000)),
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
from itertools import accumulate
from typing import Any

from playground.ui.text import RANK, Prose, Styled

BLOCKS = "█▓▒░#=+"
"""Characters of the kinds, in order. They differ without colours."""
WIDTH = 44
"""Characters of the longest bar."""
PER_LINE = 4
"""Kinds in a line of the legend."""


def bars(
    rows: Sequence[tuple[str, Mapping[str, int]]],
    kinds: Sequence[str],
    *,
    heading: str = "device",
    width: int = WIDTH,
) -> list[str | Table]:
    """A bar per row, (name, {kind: bytes}), all on one scale, with its total; below, what the
    characters stand for. `kinds` are the names of all kinds, in the order in which bars are
    stacked: at most as many as `BLOCKS`."""
    longest = max((sum(amounts.values()) for _, amounts in rows), default=0)
    scale = f"one character: {longest / width:,.0f} bytes"
    table = Table(heading, scale, *numbers(("total", "bytes")))
    drawn = [draw([amounts.get(kind, 0) for kind in kinds], longest, width) for _, amounts in rows]
    for (name, amounts), bar in zip(rows, drawn, strict=True):
        table.add(name, bar, f"{sum(amounts.values()):,}")
    seen = [
        f"{block} {kind}"
        for block, kind in zip(BLOCKS, kinds, strict=False)
        if any(block in bar for bar in drawn)
    ]
    return [
        table,
        *(
            f"  {'   '.join(seen[start : start + PER_LINE])}"
            for start in range(0, len(seen), PER_LINE)
        ),
    ]


def draw(amounts: Sequence[int], longest: int, width: int) -> str:
    """`amounts` one after another, on a scale on which `longest` is `width` characters. Each
    boundary is rounded by itself, so that a bar is as long as its sum says; what is small may not
    be seen."""
    ends = [round(total * width / longest) if longest else 0 for total in accumulate(amounts)]
    lengths = (end - start for start, end in zip([0, *ends], ends, strict=False))
    return "".join(block * length for block, length in zip(BLOCKS, lengths, strict=False))


CellText = str | Styled
GAP = 2
"""Spaces between two columns, and before the first."""
NARROWEST = 14
"""Columns with `wraps` become no narrower than this."""


@dataclass(frozen=True)
class Column:
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


def numbers(*headings: str | tuple[str, ...], wide: bool = False) -> list[Column]:
    """Columns of numbers, aligned to the right. A heading is a name, or a name, the unit of all its
    numbers, and their format."""
    triples = ((*([each] if isinstance(each, str) else each), "", "")[:3] for each in headings)
    return [Column(name, unit, form, right=True, wide=wide) for name, unit, form in triples]


def figures(*specs: tuple[Any, ...], wide: bool = False) -> dict[str, Column]:
    """Columns of numbers, by the names of values in rows. A tuple is a name, its heading, and the
    unit, format and scale of its numbers; what is left out at its end is as in `Column`, and the
    heading is the name."""
    named = {name: Column(*(about or [name])) for name, *about in specs}
    return {name: replace(column, right=True, wide=wide) for name, column in named.items()}


class Table:
    """Columns and rows. A column of text may be given by its heading; `headed` says whether
    headings are shown."""

    def __init__(
        self, *columns: Column | str, rows: Iterable[Iterable[object]] = (), headed: bool = True
    ) -> None:
        self.columns = tuple(Column(each) if isinstance(each, str) else each for each in columns)
        self.headed, self.rows = headed, list[tuple[CellText, ...]]()
        for row in rows:
            self.add(*row)

    def add(self, *values: object) -> None:
        """Add a row: a text, a number or None for each column, those for --wide included."""
        self.rows.append(
            tuple(column.cell(value) for column, value in zip(self.columns, values, strict=True))
        )


def tabulate(
    rows: Iterable[Any], columns: Mapping[str, Column], others: Column | None = None
) -> Table:
    """A table of rows, which are values by name, or dataclasses, as the document has them: under
    the columns of these names, in their order. With `others`, under all names that the rows have,
    in theirs: of those without a column the names are headings, and `others` says the rest."""
    records = [row if isinstance(row, Mapping) else vars(row) for row in rows]
    if others:
        names = dict.fromkeys(name for record in records for name in record)
        columns = {
            name: columns.get(name) or replace(others, heading=name.replace("_", " "))
            for name in names
        }
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
