"""The command that predicts: alpha, beta and gamma, measured or given, and what they mean for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.dependent_options import typed_options
from playground.console.options import RunOptions, flags, pack_options, plot_option
from playground.console.session import Session
from playground.runtime.errors import UsageError
from playground.runtime.rank import Event
from playground.runtime.remote import remote
from playground.tools import TOOLS
from playground.tools.scale import report
from playground.tools.scale.fit import evaluate, samples_of
from playground.tools.scale.plan import DEFAULT_RANKS, ScaleResult, ScaleSettings, effort, predict_cluster

TOOL = TOOLS["scale"]
MEASURE = remote("playground.tools.scale.samples:measure")
MEASURED = 20.0
"""Seconds of rounds that begin."""


@click.command(TOOL.name, short_help=TOOL.purpose)
@pack_options("settings", ScaleSettings)
@flags(RunOptions, "timeout")
@plot_option("which algorithm is the fastest for which size and number of ranks")
@flags(RunOptions, "wide", "as_json", "see")
def command(
    settings: ScaleSettings, timeout: float, plot: Path | None, wide: bool, as_json: bool, see: Path | None
) -> None:
    """Predict the time of every all-reduce algorithm from latency, bandwidth and the speed of addition.

    By default these are fitted to measurements on this host, and checked against other sizes and numbers of ranks. On
    several hosts (under torchrun), messages inside a host and between hosts have a latency and a bandwidth each. To
    predict for any other machine, give them as options; then nothing is measured.

    \b
        python -m playground scale
        python -m playground scale --alpha 5e-6 --beta 4e-11
        python -m playground scale --alpha 5e-6 --beta 4e-11 \\
            --ranks-per-node 8 --inner-alpha 2e-6 --inner-beta 3e-12
    """
    if settings.machine and "timeout" in typed_options(click.get_current_context()):
        raise UsageError("--timeout has no effect with --alpha and --beta, which start no ranks: leave it out")
    if settings.machine and see:
        raise UsageError("--see has no effect with --alpha and --beta, which start no ranks: leave it out")
    run = RunOptions(size=settings.size, timeout=timeout, wide=wide, as_json=as_json, see=see)
    session = Session(TOOL.name, run, default_size=1 if settings.machine else DEFAULT_RANKS)
    if plot and session.world.is_main:
        plots.check(plot)
    if settings.machine:
        session.say("scale: a cluster with these parameters")
        result = predict_cluster(settings.machine)
    else:
        result = measure(session)
    session.say(*report.result_texts(result))
    session.print_document(
        {}, parameters=result.parameters, measured=result.plan, fit=result.fit, predictions=result.predictions
    )
    if plot and session.world.is_main:
        report.map_plot(result.predictions.cluster, "the fastest all-reduce on a cluster", plot)


def measure(session: Session) -> ScaleResult:
    """Measure this world, fit the model to it, and check it."""
    world = session.world
    session.say(f"scale: {world}")
    world.warm_up(MEASURE)
    with session.bar() as bar:

        def on_report(rank: int, event: Event) -> None:
            if rank == 0 and "plan" in event:
                session.say(report.plan_text(event["plan"]))
            bar(rank, event)

        bar.show("starting the ranks")
        by_rank = world.run(MEASURE, effort(MEASURED), on_report=on_report)
    return evaluate(samples_of([measured.seconds for measured in by_rank]), by_rank[0].plan)
