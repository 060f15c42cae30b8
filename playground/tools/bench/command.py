"""The command `bench`: measure collectives, the backend's and ours, or compare two results."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.json import to_document
from playground.console.options import RunOptions, run_options
from playground.console.session import Session
from playground.measurement import environment
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.remote import remote
from playground.tools import TOOLS
from playground.tools.bench.compare import compare, load
from playground.tools.bench.options import BenchOptions, OutputOptions, bench_options, output_options
from playground.tools.bench.report import ReportPrinter, averages_text, bandwidth_plot, difference_text, write_csv
from playground.tools.bench.results import BenchResult

TOOL = TOOLS["bench"]
RUN = remote("playground.tools.bench.benchmark:run")


@click.command(TOOL.name, short_help=TOOL.purpose)
@run_options
@bench_options
@output_options
def command(run: RunOptions, asked: BenchOptions, output: OutputOptions) -> None:
    """Measure collectives, ours beside the backend's, with the figures of nccl-tests.

    In every round of trials each algorithm has its turn, in an order that changes, so that ratios hold on a machine
    that does other things too. Before its trials, every element of every result is checked.

    \b
        python -m playground bench --limit
        python -m playground bench -n 4 --algorithm all -b 4 -e 64M
        python -m playground bench --collective all --json > before.json
    """
    if output.diff:
        show_difference(*output.diff, run.as_json)
        return
    session = Session(TOOL.name, run)
    world, settings = session.world, asked.settings(run.seed)
    settings.check_world(world.size)
    if world.device == "cpu":
        settings.check_memory(world.local_size, world.size, environment.memory("MemAvailable"))
    check_files(output)
    world.warm_up(RUN)
    printer = ReportPrinter(session.say, world, settings)
    try:
        world.run(RUN, settings, on_report=printer)
    except KeyboardInterrupt:
        finish(session, printer.result(complete=False), output)
        raise
    result = printer.result(complete=True)
    finish(session, result, output)
    if result.wrong:
        raise PlaygroundError(f"{result.wrong} elements of the results are wrong: see the column #wrong")


def check_files(output: OutputOptions) -> None:
    """Raise `UsageError` for files that could not be written, before anything is measured."""
    if output.csv and not output.csv.absolute().parent.is_dir():
        raise UsageError(f"--csv {output.csv}: there is no such folder")
    if output.plot:
        plots.check(output.plot)


def finish(session: Session, result: BenchResult, output: OutputOptions) -> None:
    """Show what there is, complete or not."""
    world = session.world
    if not world.is_main:
        return
    if result.rows:
        session.say(averages_text(result))
    session.print_document({}, **result.document)
    if output.csv:
        write_csv(result.rows, output.csv)
    if output.plot and result.rows:
        bandwidth_plot(f"{world.backend} on {world.device}, {world.size} ranks", result, output.plot)


def show_difference(before: Path, after: Path, as_json: bool) -> None:
    """Compare two results of earlier runs."""
    one, other = load(before), load(after)
    changes = compare(one, other)
    if as_json:
        document = {"lesson": TOOL.name, "before": before, "after": after, "rows": changes}
        click.echo(to_document(document))
    else:
        click.echo(difference_text(changes, one, other))
