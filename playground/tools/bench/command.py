"""The command `bench`: measure collectives, the backend's and ours, or compare two results."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import click

from playground.console import terminal
from playground.console.dependent_options import flag_of, typed_options
from playground.console.files import check_writable
from playground.console.json import to_document
from playground.console.options import RunOptions, run_options
from playground.console.session import Session
from playground.measurement import environment
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.remote import remote
from playground.runtime.signals import stopping_signal
from playground.tools import TOOLS
from playground.tools.bench.compare import compare, load
from playground.tools.bench.csv_file import CsvFile
from playground.tools.bench.options import BenchOptions, OutputOptions, bench_options, output_options
from playground.tools.bench.plot import bandwidth_plot, check_plot
from playground.tools.bench.report import ReportPrinter, difference_texts, result_texts
from playground.tools.bench.results import BenchResult
from playground.tools.bench.settings import BenchSettings

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
