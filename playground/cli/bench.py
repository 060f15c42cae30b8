"""The command that measures collectives: the backend's, and our algorithms for all_reduce beside it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from playground.cli.asked import bench_options, check_operation, planned
from playground.cli.options import speaker, world_options
from playground.measure import compare
from playground.measure.plan import Plan
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible, PlaygroundError
from playground.show import plots, results
from playground.show.bench import BenchResult, difference_text, write_csv


@click.command("bench", short_help="measure collectives, ours beside the backend's")
@world_options
@bench_options
def bench_command(
    size: int | None, backend: str, timeout: float, init_method: str | None, as_json: bool, csv: Path | None,
    plot: Path | None, diff: tuple[Path, Path] | None, **asked: Any,
) -> None:  # fmt: skip
    """Measure collectives, ours beside the backend's, with the figures of nccl-tests.

    In every round of trials each algorithm has its turn, in an order that changes, so that ratios hold on a machine
    that does other things too. Before its trials, every element of every result is checked.

    \b
        python -m playground bench --limit
        python -m playground bench -n 4 --algorithm all -b 4 -e 64M
        python -m playground bench --collective all --json > before.json
    """
    started = time.perf_counter()
    if diff:
        show_difference(*diff, as_json)
        return
    world = World(size, backend=backend, timeout=timeout, init_method=init_method)
    plan = planned(world, **asked)
    check_files(csv, plot)
    server.preload("playground.measure.bench")
    world.warm_up()
    check_operation(plan)
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(plan).items()}
    result = BenchResult(speaker(world, silent=as_json), world, settings)
    try:
        world.run(start, plan, on_report=result)
    except KeyboardInterrupt:
        finish(result, started, False, as_json, csv, plot)
        raise
    finish(result, started, True, as_json, csv, plot)
    if result.wrong:
        raise PlaygroundError(f"{result.wrong} elements of the results are wrong: see the column #wrong")


def start(rank: int, size: int, plan: Plan) -> None:
    """What a rank runs, found only there, where torch is."""
    from playground.measure.bench import run

    run(rank, size, plan)


def check_files(csv: Path | None, plot: Path | None) -> None:
    """Raise `Impossible` for files that could not be written, before anything is measured."""
    if csv and not csv.absolute().parent.is_dir():
        raise Impossible(f"--csv {csv}: there is no such folder")
    if plot:
        plots.check(plot)


def finish(
    result: BenchResult, started: float, complete: bool, as_json: bool, csv: Path | None, plot: Path | None
) -> None:
    """Show what there is, complete or not."""
    result.finish(complete)
    world = result.world
    if not world.speaks:
        return
    if as_json:
        click.echo(results.document("bench", world, started, {}, **result.content))
    if csv:
        write_csv(result.content["rows"], csv)
    if plot and result.content["rows"]:
        about = {"backend": world.backend, "device": world.device, "world_size": world.size}
        plots.bandwidth_plot(about | result.content, plot)


def show_difference(before: Path, after: Path, as_json: bool) -> None:
    """Compare two results of earlier runs."""
    one, other = compare.load(before), compare.load(after)
    rows = compare.compare(one, other)
    if as_json:
        click.echo(json.dumps({"lesson": "bench", "before": str(before), "after": str(after), "rows": rows}))
    else:
        click.echo(difference_text(rows, one, other))
