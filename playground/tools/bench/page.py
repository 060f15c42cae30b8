"""The command `bench`: measure collectives, the backend's and ours, or compare two results; a row as soon as it is
complete, averages of all, and two results beside each other. Does not import torch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from playground.console import plots, terminal
from playground.console.options import (
    COMMON,
    flags,
    names_option,
    plot_option,
    refuse,
    select_names,
)
from playground.console.paths import FilePath
from playground.console.session import Session, session_command, to_document
from playground.console.tables import Column, Rows, Table, Texts, numbers
from playground.console.text import Prose, Styled, bad, good, heading, prose
from playground.measurement import environment, format_bytes, format_digits
from playground.measurement.environment import Environment
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.remote import remote
from playground.runtime.signals import stopping_signal
from playground.tools import TOOLS
from playground.tools.bench.results import BenchResult, ComparedRow, Row, SavedResult, compare, load
from playground.tools.bench.settings import (
    ALGORITHMS,
    COLLECTIVES,
    DEFAULT_ALGORITHMS,
    DEFAULT_COLLECTIVES,
    FACTOR,
    MEMORY,
    BenchSettings,
    geometric_range,
    parse,
    to_text,
)

TOOL = TOOLS["bench"]
RUN = remote("playground.tools.bench.benchmark:run")
MEASURED = ("begin", "end", "iterations", "warmup", "collectives", "algorithms", "dtype", "op", "limit", "plot")
"""Parameters of a measurement, beside those of every run."""


@dataclass(frozen=True)
class RowColumn:
    """A column of the table."""

    column: Column
    cell: Callable[[Row], str | Styled]
    meaning: str = ""
    """Explanation above the table, if the name alone is not enough."""


def figure(
    heading: str, unit: str, width: int, cell: Callable[[Row], str | Styled], meaning: str = "", *, wide: bool = False
) -> RowColumn:
    return RowColumn(Column(heading, unit, right=True, width=width, wide=wide), cell, meaning)


def row_columns(settings: BenchSettings) -> list[RowColumn]:
    """The columns for these settings."""
    names = [name for collective in settings.collectives for name in settings.algorithms_of(collective)]
    algorithm = Column("algorithm", width=max(map(len, ["algorithm", *names])))
    digits, of_share = len(str(settings.sizes[-1])), "elements of the tensor, or of one rank's share"
    of_all = "of the tensor, or of all ranks' shares of it together"
    columns = [
        RowColumn(Column("collective", width=14, wide=True), lambda row: row.collective),
        RowColumn(algorithm, lambda row: row.algorithm),
        figure("size", "B", max(4, digits), lambda row: str(row.size), of_all),
        figure("count", "elements", max(10, digits), lambda row: str(row.count), of_share, wide=True),
        RowColumn(Column("type", width=8, wide=True), lambda row: row.type),
        RowColumn(Column("redop", width=5, wide=True), lambda row: row.redop),
        figure("root", "rank", 6, lambda row: str(row.root), "-1 where there is none", wide=True),
        *TIME_COLUMNS,
    ]
    if settings.limit:
        columns.append(figure("%limit", "%", 6, lambda row: f"{row.limit_percent or 0:.1f}", LIMIT))
    return columns


PER_CALL = "per call, in the median trial; each trial counts as on its slowest rank"
LIMIT = "time of the memory, to copy the tensors of all ranks at once, relative to this"
WRONG = "wrong elements in the results of all ranks together"
SLOWEST = "the rank that was slowest in most trials, and in how many"
TIME_COLUMNS = (
    figure("time", "us", 9, lambda row: f"{row.time_us:.1f}", PER_CALL),
    figure("algbw", "GB/s", 8, lambda row: format_digits(row.algbw), "algorithm bandwidth, size / time", wide=True),
    figure("busbw", "GB/s", 8, lambda row: format_digits(row.busbw), "bus bandwidth, what each link carries"),
    figure("#wrong", "", 6, lambda row: bad(str(row.wrong)) if row.wrong else "0", WRONG),
    figure("p50", "us", 9, lambda row: f"{row.p50_us:.1f}", "percentiles of the trials, like p95 and p99", wide=True),
    figure("p95", "us", 9, lambda row: f"{row.p95_us:.1f}", wide=True),
    figure("p99", "us", 9, lambda row: f"{row.p99_us:.1f}", wide=True),
    figure("trials", "", 6, lambda row: str(row.trials), wide=True),
    figure("slowest", "rank: %", 9, lambda row: f"{row.slowest_rank}: {row.slowest_percent:.0f}%", SLOWEST),
)


def explain(columns: Sequence[RowColumn], wide: bool) -> list[str]:
    """A line for each column that is shown and needs one."""
    shown = [each for each in columns if each.meaning and (wide or not each.column.wide)]
    return [f"  {each.column.heading}: {each.meaning}" for each in shown]


MAX_TICKS = 12
"""Ticks on the axis of sizes: more labels would run into each other."""


def bandwidth_plot(title: str, result: BenchResult, file: Path) -> None:
    """A line for each collective and algorithm."""
    figure, axes = plots.new_axes(title, "size", "bus bandwidth (GB/s)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        lines.setdefault(f"{row.collective}, {row.algorithm}", []).append((row.size, row.busbw))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle=":" if label.endswith(MEMORY) else "-")
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
    """Takes the reports of rank 0: prints each row once it is complete, keeps all. When something ends the run, they
    are the result."""

    def __init__(self, session: Session, settings: BenchSettings) -> None:
        self.session, self.settings = session, settings
        self.environment: Environment | None = None
        self.measured: dict[tuple[str, int], list[Row]] = {}
        """By collective and size, a row per algorithm."""
        self.shown: list[list[Row]] = []
        self.columns: list[RowColumn] = []
        self.rows: Rows | None = None

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        match event:
            case {"start": Environment() as environment}:
                self.begin(environment)
            case {"measured": rows, "complete": complete}:
                self.measured[rows[0].collective, rows[0].size] = rows
                if complete:
                    self.show(rows)

    def begin(self, environment: Environment) -> None:
        """Say what is measured, on what, and what the columns mean. Nothing has been measured yet."""
        self.environment = environment
        self.columns = row_columns(self.settings)
        self.rows = self.session.rows(*(each.column for each in self.columns))
        trials = f"{self.settings.iterations} trial{'s' * (self.settings.iterations > 1)} per row"
        about = str(environment), f"{trials}, spread over the run; the columns:"
        self.session.say(f"bench: {self.session.world}", *about, *explain(self.columns, self.session.run.wide))

    def show(self, rows: list[Row]) -> None:
        """Print the rows of one size; before the first of a collective, its name."""
        collective = rows[0].collective
        if not self.shown or self.shown[-1][0].collective != collective:
            op = f"{self.settings.op} of " * COLLECTIVES[collective].reduces
            self.session.say("", prose(heading(collective), f": {op}{self.settings.dtype}"))
        for row in rows:
            if self.rows:
                self.rows.say(*(each.cell(row) for each in self.columns))
        self.shown.append(rows)

    def show_rest(self) -> None:
        """Print the rows that have some of their trials, when no more will come."""
        for rows in self.measured.values():
            if rows not in self.shown:
                self.show(rows)

    def result(self, error: str | None) -> BenchResult:
        """The result so far; `error` is the cause if the run ended early."""
        rows = [row for rows in self.measured.values() for row in rows]
        return BenchResult(settings=self.settings, environment=self.environment, rows=rows, error=error)


def result_texts(result: BenchResult) -> list[str | Prose]:
    """The averages, and, in the last line, what was measured."""
    averages = [
        f"Average busbw (GB/s), {collective}: "
        + ", ".join(f"{algorithm} {format_digits(busbw)}" for algorithm, busbw in algorithms.items())
        for collective, algorithms in result.average_busbw.items()
    ]
    names, sizes = dict.fromkeys(row.collective for row in result.rows), [row.size for row in result.rows]
    what = f"{', '.join(names)} from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    if result.error:
        trials = f"{min(row.trials for row in result.rows)} or more of {result.settings.iterations} trials per row"
        return ["", *averages, prose("Measured ", bad("in part"), f": {what}, {trials}.")]
    verdict = bad(f"{result.wrong:,} elements are wrong") if result.wrong else good("every element is right")
    return ["", *averages, *result.suspicions, prose(f"Measured: {what}; of all results, ", verdict, ".")]


def difference_texts(comparison: Mapping[str, Sequence[ComparedRow]], before: SavedResult, after: SavedResult) -> Texts:
    """Two results beside each other: what decides, a table per collective, what only one has, and a summary."""
    texts: Texts = []
    if before.environment != after.environment:
        results = ("before", before), ("after", after)
        texts += [f"{name}: {result.environment}" for name, result in results if result.environment]
    texts.append(
        "before, after: the median of the trials. A row is faster or slower if the ranges in which the middle 95 % of "
        "its trials lie, before and after, do not overlap; if they do, the trials show no difference."
    )
    for collective, changes in groupby(comparison["rows"], key=itemgetter("collective")):
        texts += ["", prose(heading(collective)), changes_table(changes)]
    return [*texts, "", *missing_texts(comparison), summary_text(comparison["rows"])]


def changes_table(changes: Iterable[ComparedRow]) -> Table:
    """A row per algorithm and size."""
    figures = numbers(("size", "B"), ("before", "us"), ("after", "us"), "after /\nbefore")
    ranges = numbers(("range before", "us"), ("range after", "us"), wide=True)
    table = Table("algorithm", *figures, "verdict", *ranges)
    for _, algorithm, size, before, after, before_range, after_range, ratio, verdict in map(dict.values, changes):
        both = ("{:.1f} to {:.1f}".format(*limits) for limits in (before_range, after_range))
        styled = STYLES[verdict](verdict) if verdict in STYLES else verdict
        table.add(algorithm, str(size), f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}", styled, *both)
    return table


def missing_texts(comparison: Mapping[str, Sequence[ComparedRow]]) -> list[str]:
    """A line for each algorithm with rows that only one result has."""
    lines = []
    for name in ("before", "after"):
        for (collective, algorithm), missing in groupby(
            comparison[f"only_{name}"], key=itemgetter("collective", "algorithm")
        ):
            sizes = ", ".join(str(row["size"]) for row in missing)
            lines.append(f"Only {name}: {collective} by {algorithm} at {sizes} bytes.")
    return lines


def summary_text(rows: Sequence[ComparedRow]) -> str:
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    return f"Compared: {len(verdicts)} row{'s' * (len(verdicts) > 1)}: {counts}."


def read_size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """A number of bytes, written with or without K, M or G."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def size_option(*names: str, default: str, help: str) -> Callable[[Any], Any]:
    return click.option(*names, callback=read_size, default=default, metavar="SIZE", show_default=True, help=help)


WHICH = "All-reduce algorithms to measure (ring: also reduce_scatter and all_gather)"
bench_options = (
    size_option("-b", "--begin", default="1K", help=f"Smallest size in bytes, the next is {FACTOR} times it."),
    size_option("-e", "--end", default="16M", help="Largest size in bytes."),
    flags(BenchSettings, "iterations", "warmup"),
    names_option(
        "--collective", "collectives", known=COLLECTIVES, default=DEFAULT_COLLECTIVES, help="Collectives to measure"
    ),
    names_option("--algorithm", "algorithms", known=ALGORITHMS, default=DEFAULT_ALGORITHMS["all_reduce"], help=WHICH),
    flags(BenchSettings, "dtype", "op", "limit"),
    plot_option("bus bandwidth against size"),
    click.option(
        "--diff",
        type=FilePath(),
        nargs=2,
        metavar="BEFORE AFTER",
        help="Compare two files that --json printed, instead of measuring.",
    ),
    refuse(
        *({*COMMON, *MEASURED} - {"wide", "as_json"}),
        why=lambda given: given["diff"] and "has no effect with --diff, which measures nothing: leave one of them out",
    ),
)


@session_command(TOOL.name, *bench_options, short_help=TOOL.purpose)
def command(
    session: Session, begin: int, end: int, plot: Path | None, diff: tuple[Path, Path] | None, **asked: Any
) -> None:
    """Measure the bandwidth of collectives, the backend's and ours side by side, in the terms of nccl-tests.

    Every element of every result is checked. Then the algorithms are timed in turns, in random order, so that their
    ratio is meaningful even on a machine that is busy with other work.

    \b
        python -m playground bench --limit
        python -m playground bench -n 4 --algorithm all -b 4 -e 64M
        python -m playground bench --collective all --json > before.json
    """
    if diff:
        before, after = diff
        one, other = load(before), load(after)
        comparison = compare(one, other)
        if session.run.as_json:
            click.echo(to_document({"lesson": TOOL.name, "before": before, "after": after, **comparison}))
        else:
            terminal.say(*difference_texts(comparison, one, other), wide=session.run.wide)
        return
    if begin > end:
        raise UsageError(f"--begin {to_text(begin)} is beyond --end {to_text(end)}: sizes go from small to large")
    asked["collectives"] = select_names(COLLECTIVES, asked["collectives"] or DEFAULT_COLLECTIVES)
    asked["algorithms"] = select_names(ALGORITHMS, asked["algorithms"])
    settings = BenchSettings(sizes=geometric_range(begin, end), seed=session.run.seed, **asked)
    check_before_start(session, settings, plot)
    session.world.warm_up(RUN)
    measure(session, settings, plot)


def check_before_start(session: Session, settings: BenchSettings, plot: Path | None) -> None:
    """Raise `UsageError` for what could not be measured, or not be written, before anything is started."""
    world = session.world
    settings.check_world(world.size)
    if world.device == "cpu":
        settings.check_memory(world.local_size, world.size, environment.memory("MemAvailable"))
    if plot and world.is_main:
        if still := [name for name in settings.collectives if COLLECTIVES[name].factor(world.size) == 0]:
            what = f"{still[0]} moves nothing, its bandwidth is 0"
            raise UsageError(f"--plot with {world.size} rank: {what}; use at least -n 2")
        plots.check(plot)


def measure(session: Session, settings: BenchSettings, plot: Path | None) -> None:
    """Measure, and show what was measured, whatever ends the run."""
    printer = ReportPrinter(session, settings)
    try:
        session.launch(RUN, settings, on_report=printer)
    except BaseException as error:
        list(finish(session, printer, describe(error), plot))
        raise
    for failure in finish(session, printer, None, plot):
        raise failure
    if wrong := printer.result(None).wrong:
        raise PlaygroundError(f"{wrong} elements of the results are wrong: see the column #wrong")


def describe(error: BaseException) -> str:
    """In one line, what ended the run."""
    if number := stopping_signal(error):
        return "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    return (str(error) or type(error).__name__).splitlines()[0]


def finish(
    session: Session, printer: ReportPrinter, error: str | None, plot: Path | None
) -> Iterator[PlaygroundError | OSError]:
    """Show and write what there is, complete or not. Yields failures of outputs; the others are still written."""
    result, world = printer.result(error), session.world
    if not world.is_main or not result.rows:
        return
    outputs: list[Callable[[], None]] = [printer.show_rest, lambda: session.say(*result_texts(result))]
    outputs += [lambda: session.print_document({}, **result.document)]
    if plot:
        title = f"{world.backend} on {world.device}, {world.size} ranks"
        outputs.append(partial(bandwidth_plot, title, result, plot))
    for show in outputs:
        try:
            show()
        except (PlaygroundError, OSError) as failure:
            yield failure
