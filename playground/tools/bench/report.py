"""A benchmark as text: rows as soon as they are complete, what they come to, and two results beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.tables import Column, Rows, Table
from playground.console.text import Prose, bad, good, heading, prose
from playground.measurement.environment import Environment
from playground.measurement.units import format_bytes, format_digits
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.columns import RowColumn, explain, row_columns
from playground.tools.bench.compare import Comparison, RowName, SavedResult
from playground.tools.bench.csv_file import CsvFile
from playground.tools.bench.results import BenchResult, BenchStart, Limit, Row, SizeResult
from playground.tools.bench.settings import BenchSettings

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
