"""The command `bench`: measure collectives, the backend's and ours, or compare two results; a row
as soon as it is complete, averages of all, or two results beside each other. Does not import
torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from playground.base.errors import PlaygroundError, UsageError
from playground.base.flags import flag, flags_of
from playground.base.remote import remote
from playground.measurement import environment
from playground.tools import TOOLS
from playground.tools.bench import steps
from playground.tools.bench.plot import check, plot_bandwidth
from playground.tools.bench.results import Change, Row, average_busbw, compare, load
from playground.tools.bench.settings import COLLECTIVES, FACTOR, BenchSettings, geometric_range
from playground.ui import terminal
from playground.ui.commands import Group
from playground.ui.options import flags, refuse
from playground.ui.session import Session, session_command, to_document
from playground.ui.tables import Column, Rows, Texts, named_numbers, tabulate
from playground.ui.text import bad, good, heading, prose
from playground.ui.units import format_bytes, format_digits, plural
from playground.world.rank.reports import Event

TOOL = TOOLS["bench"]
RUN = remote("playground.tools.bench.benchmark:run")


def figure(heading: str, unit: str, width: int, format: str = "", *, wide: bool = False) -> Column:
    return Column(heading, unit, format, right=True, width=width, wide=wide)


def columns_of(settings: BenchSettings) -> dict[str, Column]:
    """The columns for these settings, by the names of values in rows."""
    names = [
        name for collective in settings.collectives for name in settings.algorithms_of(collective)
    ]
    columns = {
        "collective": Column("collective", width=14, wide=True),
        "algorithm": Column("algorithm", width=max(map(len, ["algorithm", *names]))),
        "size": figure("size", "B", max(4, len(str(settings.sizes[-1])))),
        "count": figure("count", "elements", max(10, len(str(settings.sizes[-1]))), wide=True),
        "type": Column("type", width=8, wide=True),
        "redop": Column("redop", width=5, wide=True),
        "root": figure("root", "rank", 6, wide=True),
        "time_us": figure("time", "us", 9, ".1f"),
        "algbw": figure("algbw", "GB/s", 8, wide=True),
        "busbw": figure("busbw", "GB/s", 8),
        "wrong": figure("#wrong", "", 6),
        "p50_us": figure("p50", "us", 9, ".1f", wide=True),
        "p95_us": figure("p95", "us", 9, ".1f", wide=True),
        "p99_us": figure("p99", "us", 9, ".1f", wide=True),
        "trials": figure("trials", "", 6, wide=True),
        "slowest": figure("slowest", "rank: %", 9),
        "limit_percent": figure("%limit", "%", 6, ".1f"),
    }
    if not settings.limit:
        del columns["limit_percent"]
    return columns


def cells(row: Row, columns: Iterable[str]) -> list[object]:
    """The values of a row under these columns."""
    shown = row.values | {
        "algbw": format_digits(row.algbw),
        "busbw": format_digits(row.busbw),
        "wrong": bad(str(row.wrong)) if row.wrong else 0,
        "slowest": f"{row.slowest_rank}: {row.slowest_percent:.0f}%",
    }
    return [shown[name] for name in columns]


class Report:
    """Takes the reports of rank 0: prints each row once it is complete, and keeps all."""

    def __init__(self, session: Session, settings: BenchSettings) -> None:
        self.session = session
        self.settings = settings
        self.columns = columns_of(settings)
        self.printed = Rows(session.say, *self.columns.values())
        self.environment: environment.Environment | None = None
        self.rows: list[Row] = []

    def __call__(self, rank: int, event: Event) -> None:
        match event:
            case {"start": found}:
                self.environment = found  # nothing has been measured yet
                iterations = self.settings.iterations
                trials = f"{plural(iterations, 'trial')} per row, spread over the run"
                self.session.say(f"bench: {self.session.world}", str(found), trials)
            case {"measured": rows}:
                self.show(rows)

    def show(self, rows: list[Row]) -> None:
        """Print the rows of one size; before the first of a collective, its name."""
        collective = rows[0].collective
        if not self.rows or self.rows[-1].collective != collective:
            op = f"{self.settings.op} of " if COLLECTIVES[collective].reduces else ""
            self.session.say("", prose(heading(collective), f": {op}{self.settings.dtype}"))
        for row in rows:
            self.printed.say(*cells(row, self.columns))
        self.rows += rows

    def finish(self, plot: Path | None) -> None:
        """Say the averages, and, in the last line, what was measured. Raises `PlaygroundError` if
        results are wrong."""
        world = self.session.world
        averages = average_busbw(self.rows)
        wrong = sum(row.wrong for row in self.rows)
        if not world.is_main:
            return
        lines = []
        for collective, algorithms in averages.items():
            told = ", ".join(f"{name} {format_digits(each)}" for name, each in algorithms.items())
            lines.append(f"Average busbw (GB/s), {collective}: {told}")
        names = dict.fromkeys(row.collective for row in self.rows)
        sizes = [row.size for row in self.rows]
        what = f"{', '.join(names)} from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        verdict = bad(f"{wrong:,} elements are wrong") if wrong else good("every result is correct")
        self.session.say("", *lines, prose(f"Measured: {what}; ", verdict, "."))
        self.session.print_document(
            {},
            environment=self.environment,
            settings=self.settings.document,
            rows=[row.values for row in self.rows],
            average_busbw=averages,
        )
        if plot:
            plot_bandwidth(
                f"{world.backend} on {world.device}, {world.size} ranks", self.rows, plot
            )
        if wrong:
            raise PlaygroundError(
                f"{wrong} elements of the results are wrong: see the column #wrong"
            )


def difference_texts(changes: Sequence[Change]) -> Texts:
    """Two results beside each other: what decides, a table per collective, and a summary."""
    texts: Texts = [
        "before, after: the median of the trials. A row is faster or slower if the ranges in which "
        "the middle 95 % of its trials lie, before and after, do not overlap; if they do, the "
        "trials show no difference."
    ]
    for collective, rows in groupby(changes, key=attrgetter("collective")):
        texts += ["", prose(heading(collective)), tabulate(map(shown_change, rows), CHANGES)]
    verdicts = [row.verdict for row in changes]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)
    )
    return [*texts, "", f"Compared: {plural(len(verdicts), 'row')}: {counts}."]


CHANGES = {
    "algorithm": Column("algorithm"),
    **named_numbers(
        ("size", "size", "B"),
        ("before_us", "before", "us", ".1f"),
        ("after_us", "after", "us", ".1f"),
    ),
    **named_numbers(("ratio", "after /\nbefore", "", ".2f")),
    "verdict": Column("verdict"),
    **named_numbers(
        ("before_range_us", "range before", "us"),
        ("after_range_us", "range after", "us"),
        wide=True,
    ),
}


def shown_change(row: Change) -> dict[str, object]:
    """The values of a row of the table."""
    style = {"faster": good, "slower": bad}.get(row.verdict, str)
    return vars(row) | {
        "before_range_us": "{:.1f} to {:.1f}".format(*row.before_range_us),
        "after_range_us": "{:.1f} to {:.1f}".format(*row.after_range_us),
        "verdict": style(row.verdict),
    }


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `bench` beside its settings."""

    begin: int = flag(
        2**10,
        f"Smallest size in bytes, the next is {FACTOR} times it.",
        name="-b --begin",
        is_size=True,
        shown_default="1K",
    )
    end: int = flag(
        2**24, "Largest size in bytes.", name="-e --end", is_size=True, shown_default="16M"
    )
    plot: Path | None = flag(
        None, "Also draw bus bandwidth against size: .svg or .png.", metavar="FILE"
    )
    diff: tuple[Path, Path] | None = flag(
        None,
        "Compare two files that --json printed, instead of measuring.",
        metavar="BEFORE AFTER",
    )


OF_WORLD = ("size", "backend", "timeout")


def refuse_options_before(context: click.Context) -> None:
    """Raise `UsageError` if an option of this command was typed before its subcommand, which has
    options of its own."""
    for param in context.command.params:
        if context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            name = context.invoked_subcommand
            raise UsageError(
                f"{param.opts[0]} stands before {name}: write {TOOL.name} {name} {param.opts[0]} …"
            )


@session_command(
    TOOL.name,
    flags(BenchOptions),
    flags(BenchSettings),
    refuse(
        *(*OF_WORLD, *flags_of(BenchSettings), "begin", "end", "plot"),
        why=lambda given: (
            given["diff"]
            and "has no effect with --diff, which measures nothing: leave one of them out"
        ),
    ),
    only=(*OF_WORLD, "wide", "as_json"),
    short_help=TOOL.purpose,
    kind=Group,
    invoke_without_command=True,
)
@click.pass_context
def command(
    context: click.Context,
    /,
    session: Session,
    begin: int,
    end: int,
    plot: Path | None,
    diff: tuple[Path, Path] | None,
    **asked: Any,
) -> None:
    """Measure the bandwidth of collectives, the backend's and ours side by side, in the terms of
    nccl-tests.

    Every element of every result is checked. Then the algorithms are timed in turns, in random
    order, so that their ratio is meaningful even on a machine that is busy with other work.

    \b
        python -m playground bench --limit
        python -m playground bench -n 4 --algorithm all -b 4 -e 64M
        python -m playground bench --collective all --json > before.json
        python -m playground bench steps --model resnet18
    """
    if context.invoked_subcommand:
        refuse_options_before(context)
        return
    if diff:
        before, after = diff
        changes = compare(load(before), load(after))
        if session.run.as_json:
            found = {"lesson": TOOL.name, "before": before, "after": after, "rows": changes}
            click.echo(to_document(found))
        else:
            terminal.say(*difference_texts(changes), wide=session.run.wide)
        return
    if begin > end:
        raise UsageError(
            f"--begin {format_bytes(begin)} is beyond --end {format_bytes(end)}: sizes go from "
            "small to large"
        )
    settings = BenchSettings(sizes=geometric_range(begin, end), **asked)
    world = session.world
    settings.check_world(world.size)
    if world.device == "cpu":
        settings.check_memory(world.local_size, world.size, environment.memory("MemAvailable"))
    if plot and world.is_main:
        check(plot, world.size)
    world.warm_up(RUN)
    report = Report(session, settings)
    session.launch(RUN, settings, on_report=report)
    report.finish(plot)


command.add_command(steps.command)
