"""The columns of a benchmark: in its table, where some are for --wide only, and in its CSV file, which has all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from playground.console.tables import Column
from playground.console.text import Styled, bad
from playground.measurement.units import format_digits
from playground.tools.bench.results import Row
from playground.tools.bench.settings import BenchSettings

CSV_FIELDS = (
    "collective", "algorithm", "size", "count", "type", "redop", "root", "time_us", "algbw", "busbw", "wrong",
    "p50_us", "p95_us", "p99_us", "trials", "slowest_rank", "slowest_percent", "limit_percent",
)  # fmt: skip
"""Fields of a `Row`, by the names that JSON has for them."""


@dataclass(frozen=True, kw_only=True)
class RowColumn:
    """A column of the table."""

    column: Column
    cell: Callable[[Row], str | Styled]
    meaning: str = ""
    """What is said of it above the table, if the name alone does not do."""


def number(heading: str, unit: str, width: int, *, wide: bool = False) -> Column:
    return Column(heading, unit, right=True, width=width, wide=wide)


def row_columns(settings: BenchSettings, wire: str | None) -> list[RowColumn]:
    """The columns for these settings; `wire` says what the limit is, if it is measured."""
    names = [name for collective in settings.collectives for name in settings.algorithms_of(collective)]
    algorithm = Column("algorithm", width=max(len("algorithm"), *map(len, names)))
    columns = [
        RowColumn(column=Column("collective", width=14, wide=True), cell=lambda row: row.collective),
        RowColumn(column=algorithm, cell=lambda row: row.algorithm),
        *size_columns(len(str(settings.sizes[-1]))),
        *TIME_COLUMNS,
    ]
    if wire:
        columns.append(replace(LIMIT, meaning=f"busbw relative to {wire}"))
    return columns


def size_columns(digits: int) -> list[RowColumn]:
    """What was moved: in the default table its size only."""
    return [
        RowColumn(
            column=number("size", "B", max(4, digits)), cell=lambda row: str(row.size),
            meaning="of the tensor, or of all ranks' shares of it together",
        ),
        RowColumn(column=number("count", "elements", max(10, digits), wide=True), cell=lambda row: str(row.count),
                  meaning="elements of the tensor, or of one rank's share"),
        RowColumn(column=Column("type", width=8, wide=True), cell=lambda row: row.type),
        RowColumn(column=Column("redop", width=5, wide=True), cell=lambda row: row.redop),
        RowColumn(column=number("root", "rank", 6, wide=True), cell=lambda row: str(row.root),
                  meaning="-1 where there is none"),
    ]  # fmt: skip


def wrong_cell(row: Row) -> str | Styled:
    return bad(str(row.wrong)) if row.wrong else "0"


TIME_COLUMNS = (
    RowColumn(
        column=number("time", "us", 9), cell=lambda row: f"{row.time_us:.1f}",
        meaning="per call, in the median trial; each trial counts as on its slowest rank",
    ),
    RowColumn(
        column=number("algbw", "GB/s", 8, wide=True), cell=lambda row: format_digits(row.algbw),
        meaning="algorithm bandwidth, size / time",
    ),
    RowColumn(
        column=number("busbw", "GB/s", 8), cell=lambda row: format_digits(row.busbw),
        meaning="bus bandwidth, what each link carries",
    ),
    RowColumn(
        column=number("#wrong", "", 6), cell=wrong_cell,
        meaning="wrong elements in the results of all ranks together",
    ),
    RowColumn(column=number("p50", "us", 9, wide=True), cell=lambda row: f"{row.p50_us:.1f}",
              meaning="percentiles of the trials, like p95 and p99"),
    RowColumn(column=number("p95", "us", 9, wide=True), cell=lambda row: f"{row.p95_us:.1f}"),
    RowColumn(column=number("p99", "us", 9, wide=True), cell=lambda row: f"{row.p99_us:.1f}"),
    RowColumn(column=number("trials", "", 6, wide=True), cell=lambda row: str(row.trials)),
    RowColumn(
        column=number("slowest", "rank: %", 9), cell=lambda row: f"{row.slowest_rank}: {row.slowest_percent:.0f}%",
        meaning="the rank that was slowest in most trials, and in how many",
    ),
)  # fmt: skip
LIMIT = RowColumn(column=number("%limit", "%", 6), cell=lambda row: f"{row.limit_percent or 0:.1f}")


def explain(columns: Sequence[RowColumn], wide: bool) -> list[str]:
    """A line for each column that is shown and needs one."""
    return [
        f"  {each.column.heading}: {each.meaning}"
        for each in columns if each.meaning and (wide or not each.column.wide)
    ]  # fmt: skip
