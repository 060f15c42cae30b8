"""The command `bench`: measure collectives, the backend's and ours, or compare two results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.console import terminal
from playground.console.dependent_options import flag_of, typed_options
from playground.console.names import names_option, select_names
from playground.console.options import RunOptions, flags, pack_options, plot_option, run_options
from playground.console.paths import FilePath, check_writable
from playground.console.session import Session, to_document
from playground.measurement import environment
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.remote import remote
from playground.runtime.signals import stopping_signal
from playground.tools import TOOLS
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.compare import compare, load
from playground.tools.bench.report import (
    CsvFile,
    ReportPrinter,
    bandwidth_plot,
    check_plot,
    difference_texts,
    result_texts,
)
from playground.tools.bench.results import BenchResult
from playground.tools.bench.settings import (
    ALGORITHMS,
    DEFAULT_ALGORITHMS,
    DEFAULT_COLLECTIVES,
    MAX_TRIALS,
    BenchSettings,
    geometric_range,
    parse,
    to_text,
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `collectives` and `algorithms` are words as `names_option` reads them."""

    begin: int
    end: int
    factor: int
    iterations: int
    warmup: int
    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtype: str
    op: str
    limit: bool

    def settings(self, seed: int) -> BenchSettings:
        """Raises `UsageError` for what cannot be measured."""
        if self.begin > self.end:
            raise UsageError(
                f"--begin {to_text(self.begin)} is beyond --end {to_text(self.end)}: sizes go from small to large"
            )
        return BenchSettings(
            collectives=select_names(tuple(COLLECTIVES), self.collectives or DEFAULT_COLLECTIVES),
            algorithms=select_names(ALGORITHMS, self.algorithms),
            sizes=geometric_range(self.begin, self.end, self.factor), dtype=self.dtype, op=self.op,
            iterations=self.iterations, warmup=self.warmup, limit=self.limit, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files to write the result to, and files to compare instead of measuring."""

    csv: Path | None
    plot: Path | None
    diff: tuple[Path, Path] | None


def read_size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """A number of bytes, written with or without K, M or G."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def size_option(*flags: str, default: str, help: str) -> Callable[[Any], Any]:
    return click.option(*flags, callback=read_size, default=default, metavar="SIZE", show_default=True, help=help)


def file_option(flag: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(flag, type=FilePath(), **more)


bench_options = pack_options(
    "asked", BenchOptions,
    size_option("-b", "--begin", default="1K", help="Smallest size in bytes."),
    size_option("-e", "--end", default="16M", help="Largest size in bytes."),
    click.option(
        "-f", "--factor", type=click.IntRange(2), default=4, show_default=True,
        help="Ratio of each size to the one before.",
    ),
    flags(
        BenchSettings,
        *("iterations", "warmup"),
        changes={
            "iterations": {"type": click.IntRange(1, MAX_TRIALS)},
            "warmup": {"type": click.IntRange(0, MAX_TRIALS)},
        },
    ),
    names_option(
        "--collective", "collectives", known=tuple(COLLECTIVES), default=DEFAULT_COLLECTIVES,
        help="Collectives to measure",
    ),
    names_option(
        "--algorithm", "algorithms", known=ALGORITHMS, default=DEFAULT_ALGORITHMS["all_reduce"],
        help="All-reduce algorithms to measure (ring: also reduce_scatter and all_gather)",
    ),
    flags(BenchSettings, "dtype", "op", "limit"),
)  # fmt: skip
"""Gives a command the argument `asked`: its `BenchOptions`."""

output_options = pack_options(
    "output", OutputOptions,
    file_option("--csv", metavar="FILE", help="Also write the rows to FILE as CSV."),
    plot_option("bus bandwidth against size"),
    file_option(
        "--diff", nargs=2, metavar="BEFORE AFTER",
        help="Compare two files that --json printed, instead of measuring.",
    ),
)  # fmt: skip
"""Gives a command the argument `output`: its `OutputOptions`."""


TOOL = TOOLS["bench"]
RUN = remote("playground.tools.bench.benchmark:run")
WITH_DIFF = {"diff", "wide", "as_json"}
"""Parameters that --diff leaves something to do."""


@click.command(TOOL.name, short_help=TOOL.purpose)
@run_options(2)
@bench_options
@output_options
def command(run: RunOptions, asked: BenchOptions, output: OutputOptions) -> None:
    """Measure the bandwidth of collectives, the backend's and ours side by side, in the terms of nccl-tests.

    Every element of every result is checked. Then the algorithms are timed in turns, in random order, so that their
    ratio is meaningful even on a machine that is busy with other work.

    \b
        python -m playground bench --limit
        python -m playground bench -n 4 --algorithm all -b 4 -e 64M
        python -m playground bench --collective all --json > before.json
    """
    if output.diff:
        refuse_options_without_effect()
        show_difference(*output.diff, run)
        return
    session = Session(TOOL.name, run)
    settings = asked.settings(run.seed)
    check_before_start(session, settings, output)
    session.world.warm_up(RUN)
    measure(session, settings, output)


def refuse_options_without_effect() -> None:
    """Raise `UsageError` for an option that was typed beside --diff, which measures nothing."""
    ctx = click.get_current_context()
    for name in typed_options(ctx):
        if name not in WITH_DIFF:
            raise UsageError(
                f"{flag_of(ctx, name)} has no effect with --diff, which measures nothing: leave one of them out"
            )


def check_before_start(session: Session, settings: BenchSettings, output: OutputOptions) -> None:
    """Raise `UsageError` for what could not be measured, or not be written, before anything is started."""
    world = session.world
    settings.check_world(world.size)
    if world.device == "cpu":
        settings.check_memory(world.local_size, world.size, environment.memory("MemAvailable"))
    if output.csv and world.is_main:
        check_writable("--csv", output.csv)
    if output.plot and world.is_main:
        check_plot(settings, world.size, output.plot)


def measure(session: Session, settings: BenchSettings, output: OutputOptions) -> None:
    """Measure, and show what was measured, whatever ends the run."""
    csv_file = CsvFile(output.csv if session.world.is_main else None)
    with session.bar() as bar:
        bar.show("starting the ranks")
        printer = ReportPrinter(session, settings, bar, csv_file)
        try:
            session.world.run(RUN, settings, on_report=printer)
        except BaseException as error:
            bar.clear()
            list(finish(session, printer, describe(error), output))
            raise
    for failure in finish(session, printer, None, output):
        raise failure
    wrong = printer.result(None).wrong
    if wrong:
        raise PlaygroundError(f"{wrong} elements of the results are wrong: see the column #wrong")


def describe(error: BaseException) -> str:
    """In one line, what ended the run."""
    if number := stopping_signal(error):
        return "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    return (str(error) or type(error).__name__).splitlines()[0]


def finish(
    session: Session, printer: ReportPrinter, error: str | None, output: OutputOptions
) -> Iterator[PlaygroundError | OSError]:
    """Show and write what there is, complete or not. Yields what went wrong with one output; the others go on."""
    result = printer.result(error)
    if not session.world.is_main or not result.rows:
        return
    shown = (
        printer.show_rest,
        lambda: session.say(*result_texts(result)),
        lambda: session.print_document({}, **result.document),
        printer.csv_file.check,
        lambda: draw(session, result, output.plot),
    )
    for show in shown:
        try:
            show()
        except (PlaygroundError, OSError) as failure:
            yield failure


def draw(session: Session, result: BenchResult, file: Path | None) -> None:
    world = session.world
    if file:
        bandwidth_plot(f"{world.backend} on {world.device}, {world.size} ranks", result, file)


def show_difference(before: Path, after: Path, run: RunOptions) -> None:
    """Compare two results of earlier runs."""
    one, other = load(before), load(after)
    comparison = compare(one, other)
    if run.as_json:
        document = {"lesson": TOOL.name, "before": before, "after": after, **vars(comparison)}
        click.echo(to_document(document))
    else:
        terminal.say(*difference_texts(comparison, one, other), wide=run.wide)
