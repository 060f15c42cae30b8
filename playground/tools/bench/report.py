"""A benchmark as text: rows as soon as they are complete, what they come to, and two results beside each other."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from playground.console import plots
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.tables import Column, Rows, Table
from playground.console.text import Prose, Styled, bad, good, heading, prose
from playground.measurement import format_bytes, format_digits
from playground.measurement.environment import Environment
from playground.runtime.errors import PlaygroundError, UsageError
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.compare import Comparison, RowName, SavedResult
from playground.tools.bench.results import BenchResult, BenchStart, Limit, Row, SizeResult
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


class CsvFile:
    """One line per row, under the names that JSON has for the fields. Without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.failure: OSError | None = None

    def begin(self) -> None:
        """Make the file, with its header. Raises `UsageError` if that fails: nothing has been measured yet."""
        try:
            self.write([])
        except OSError as error:
            raise UsageError(f"--csv {self.path} cannot be written: {error.strerror}") from None

    def update(self, rows: Sequence[Row]) -> None:
        """Have these rows in the file. If that fails, the measurement goes on: `check` says so at the end."""
        try:
            self.write(rows)
            self.failure = None
        except OSError as error:
            self.failure = error

    def check(self) -> None:
        """Raise `PlaygroundError` unless every row is in the file."""
        if self.failure:
            raise PlaygroundError(f"--csv {self.path} lacks rows ({self.failure.strerror}): they are printed above")

    def write(self, rows: Sequence[Row]) -> None:
        """Write all anew beside the file, then put it in its place: a disk that is full costs no row that is there."""
        if self.path is None:
            return
        target = self.path.resolve()
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            write_rows(target, rows)  # a pipe or a device, or a file in a folder that is not ours
            return
        part = target.with_name(f"{target.name}.part")
        try:
            write_rows(part, rows)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, CSV_FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(vars, rows))


MAX_TICKS = 12
"""On the axis of sizes: more labels would run into each other."""


def check_plot(settings: BenchSettings, size: int, file: Path) -> None:
    """Raise `UsageError` if there will be nothing to draw, or no file to draw it in."""
    still = [name for name in settings.collectives if COLLECTIVES[name].factor(size) == 0]
    if still:
        raise UsageError(f"--plot with {size} rank: {still[0]} moves nothing, its bandwidth is 0; use at least -n 2")
    plots.check(file)


def bandwidth_plot(title: str, result: BenchResult, file: Path) -> None:
    """A line for each collective and algorithm, and one for the wire if it was measured."""
    figure, axes = plots.new_axes(title, "size", "bus bandwidth (GB/s)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        lines.setdefault(f"{row.collective}, {row.algorithm}", []).append((row.size, row.busbw))
    for wire_row in result.limit.rows if result.limit else []:
        lines.setdefault(f"limit ({wire_row.collective})", []).append((wire_row.size, wire_row.busbw))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle=":" if "limit" in label else "-")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    ticks = choose_ticks(sorted({row.size for row in result.rows}))
    axes.set_xticks(ticks, labels=[format_bytes(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.legend()
    plots.save(figure, file)


def choose_ticks(sizes: Sequence[int]) -> Sequence[int]:
    """The sizes that were measured; every second, third, … of them where there are too many."""
    return sizes[:: -(-len(sizes) // MAX_TICKS)]


STYLES = {"faster": good, "slower": bad}


class ReportPrinter:
    """Takes what rank 0 reports: shows how far it is, writes the rows so far to the CSV file, prints each row once it
    is complete, and keeps all. When something ends the run, that is the result."""

    def __init__(self, session: Session, settings: BenchSettings, bar: Bar, csv_file: CsvFile) -> None:
        self.session, self.settings, self.bar, self.csv_file = session, settings, bar, csv_file
        self.environment: Environment | None = None
        self.wire: str | None = None
        self.measured: dict[tuple[str, int], SizeResult] = {}
        self.shown: list[SizeResult] = []
        self.columns: list[RowColumn] = []
        self.rows: Rows | None = None
        self.collective = ""
        """Of the last row."""

    def __call__(self, rank: int, event: Mapping[str, object]) -> None:
        self.bar(rank, dict(event))
        match event:
            case {"start": BenchStart() as start}:
                self.begin(start)
            case {"measured": SizeResult() as measured}:
                self.measured[measured.collective, measured.size] = measured
                self.csv_file.update(self.all_rows())
                if measured.complete:
                    self.show(measured)

    def begin(self, start: BenchStart) -> None:
        """Say what is measured, on what, and what the columns mean. Nothing has been measured yet."""
        self.environment, self.wire = start.environment, start.wire
        self.csv_file.begin()
        self.columns = row_columns(self.settings, start.wire)
        self.rows = self.session.rows(*(each.column for each in self.columns))
        self.session.say(
            f"bench: {self.session.world}", str(start.environment), trials_text(self.settings),
            *explain(self.columns, self.session.run.wide),
        )  # fmt: skip

    def show(self, measured: SizeResult) -> None:
        """Print the rows of one size; before the first of a collective, its name."""
        if self.collective != measured.collective:
            self.collective = measured.collective
            self.session.say("", prose(heading(measured.collective), f": {self.describe(measured.collective)}"))
        for row in measured.rows:
            if self.rows:
                self.rows.say(*(each.cell(row) for each in self.columns))
        self.shown.append(measured)

    def describe(self, collective: str) -> str:
        """What is done to what."""
        return f"{self.settings.op} of " * COLLECTIVES[collective].reduces + self.settings.dtype

    def show_rest(self) -> None:
        """Print the rows that have some of their trials, when no more will come."""
        for measured in self.measured.values():
            if measured not in self.shown:
                self.show(measured)

    def all_rows(self) -> list[Row]:
        """Those measured so far, some with fewer trials than they will have."""
        return [row for measured in self.measured.values() for row in measured.rows]

    def result(self, error: str | None) -> BenchResult:
        """What was reported so far; `error` says what ended the run before its end."""
        wire_rows = [measured.wire for measured in self.measured.values() if measured.wire]
        return BenchResult(
            settings=self.settings, environment=self.environment,
            rows=self.all_rows(),
            limit=Limit(what=self.wire, rows=wire_rows) if self.wire else None, error=error,
        )  # fmt: skip


def trials_text(settings: BenchSettings) -> str:
    return f"{settings.iterations} trial{'s' * (settings.iterations > 1)} per row, spread over the run; the columns:"


def result_texts(result: BenchResult) -> list[str | Prose]:
    """The averages, and, in the last line, what was measured."""
    averages = [
        f"Average busbw (GB/s), {collective}: "
        + ", ".join(f"{algorithm} {format_digits(busbw)}" for algorithm, busbw in algorithms.items())
        for collective, algorithms in result.average_busbw.items()
    ]
    return ["", *averages, measured_text(result)]


def measured_text(result: BenchResult) -> Prose:
    names = dict.fromkeys(row.collective for row in result.rows)
    sizes = [row.size for row in result.rows]
    what = f"{', '.join(names)} from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    if result.error:
        trials = f"{min(row.trials for row in result.rows)} or more of {result.settings.iterations} trials per row"
        return prose("Measured ", bad("in part"), f": {what}, {trials}.")
    verdict = bad(f"{result.wrong:,} elements are wrong") if result.wrong else good("every element is right")
    return prose(f"Measured: {what}; of all results, ", verdict, ".")


def difference_texts(comparison: Comparison, before: SavedResult, after: SavedResult) -> list[str | Prose | Table]:
    """Two results beside each other: what decides, a table per collective, what only one has, and a summary."""
    texts: list[str | Prose | Table] = []
    if before.environment != after.environment:
        results = ("before", before), ("after", after)
        texts += [f"{name}: {result.environment}" for name, result in results if result.environment]
    texts.append(
        "before, after: the median of the trials. A row is faster or slower if the ranges in which the middle 95 % of "
        "its trials lie, before and after, do not overlap; if they do, the trials show no difference."
    )
    for collective, changes in groupby(comparison.rows, key=lambda row: row.collective):
        table = Table(
            Column("algorithm"), Column("size", "B", right=True), Column("before", "us", right=True),
            Column("after", "us", right=True), Column("after /\nbefore", right=True), Column("verdict"),
            Column("range before", "us", wide=True, right=True), Column("range after", "us", wide=True, right=True),
        )  # fmt: skip
        for change in changes:
            verdict = STYLES[change.verdict](change.verdict) if change.verdict in STYLES else change.verdict
            ranges = ["{:.1f} to {:.1f}".format(*each) for each in (change.before_range_us, change.after_range_us)]
            table.add(
                change.algorithm, str(change.size), f"{change.before_us:.1f}", f"{change.after_us:.1f}",
                f"{change.ratio:.2f}", verdict, *ranges,
            )  # fmt: skip
        texts += ["", prose(heading(collective)), table]
    return [*texts, "", *missing_texts(comparison), summary_text(comparison)]


def missing_texts(comparison: Comparison) -> list[str]:
    """A line for each algorithm with rows that only one result has."""
    lines = []
    for name, rows in (("before", comparison.only_before), ("after", comparison.only_after)):
        for (collective, algorithm), missing in groupby(rows, key=lambda row: (row.collective, row.algorithm)):
            lines.append(f"Only {name}: {collective} by {algorithm} at {sizes_text(list(missing))} bytes.")
    return lines


def sizes_text(rows: Sequence[RowName]) -> str:
    return ", ".join(str(row.size) for row in rows)


def summary_text(comparison: Comparison) -> str:
    verdicts = [row.verdict for row in comparison.rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    return f"Compared: {len(verdicts)} row{'s' * (len(verdicts) > 1)}: {counts}."
