"""The command that predicts: alpha, beta and gamma, measured or given, and what they mean for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.options import Finite, RunOptions, json_option, pack_options, plot_option, timeout_option
from playground.console.session import Session
from playground.runtime.host import cores
from playground.runtime.remote import remote
from playground.tools.scale import report
from playground.tools.scale.fit import evaluate, plan_for, samples_of
from playground.tools.scale.predict import predict_cluster
from playground.tools.scale.results import ScaleResult
from playground.tools.scale.settings import DEFAULT_RANKS, MAX_RANKS, MIN_RANKS, ScaleSettings

MEASURE = remote("playground.tools.scale.samples:measure")
MEASURED = 20.0
"""Seconds of rounds that begin."""
positive = Finite(0, min_open=True)
scale_options = pack_options(
    "settings", ScaleSettings,
    click.option(
        "-n", "--world-size", "size", type=click.IntRange(MIN_RANKS, MAX_RANKS), show_default=str(DEFAULT_RANKS),
        help="Ranks to measure with.",
    ),
    click.option(
        "--alpha", type=positive, help="Latency: seconds per message. With --beta: measure nothing, take these."
    ),
    click.option("--beta", type=positive, help="Inverse bandwidth: seconds per byte. 1e-10 is 10 GB/s."),
    click.option("--gamma", type=Finite(0), show_default="0", help="Seconds that adding takes per byte."),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Two levels: --alpha and --beta are between nodes."),
    click.option("--inner-alpha", type=positive, help="Seconds per message inside a node."),
    click.option("--inner-beta", type=positive, help="Seconds per byte inside a node."),
)  # fmt: skip


@click.command("scale", short_help="predict all-reduce on up to 65,536 ranks, and check the model against this host")
@scale_options
@timeout_option
@plot_option("which algorithm is the fastest where")
@json_option
def command(settings: ScaleSettings, timeout: float, plot: Path | None, as_json: bool) -> None:
    """Predict what every algorithm for all-reduce takes, from latency, bandwidth and the speed of adding.

    These are fitted to short measurements on this host, and tried on sizes and groups that they were not fitted to. Or
    they are given, for a cluster of any kind: then nothing is measured.

    \b
        python -m playground scale
        python -m playground scale --alpha 5e-6 --beta 4e-11
        python -m playground scale --alpha 5e-6 --beta 4e-11 --ranks-per-node 8 --inner-alpha 2e-6 --inner-beta 3e-12
    """
    run = RunOptions(size=settings.size, timeout=timeout, as_json=as_json)
    session = Session("scale", run, default_size=1 if settings.machine else DEFAULT_RANKS)
    if plot:
        plots.check(plot)
    if settings.machine:
        session.say("scale: a cluster, as given")
        result = predict_cluster(settings.machine)
    else:
        result = measure_host(session, settings)
    session.say(report.result_text(result))
    if plot and session.world.is_main:
        report.map_plot(result.predictions.cluster, "the fastest all-reduce on a cluster", plot)
    session.print_document({}, parameters=result.parameters, fit=result.fit, predictions=result.predictions)


def measure_host(session: Session, settings: ScaleSettings) -> ScaleResult:
    """Measure this host, fit the model to it, and check it."""
    world = session.world
    settings.check_measurable(world.size, world.local_size)
    plan = plan_for(world.size, MEASURED)
    fitted, held_out = (" and ".join(map(str, sizes)) for sizes in (plan.fitted, plan.held_out))
    session.say(f"scale: {world}; groups of {fitted} to fit, of {held_out} to check, {MEASURED:g} s …")
    world.warm_up(MEASURE)
    return evaluate(samples_of(world.run(MEASURE, plan)), plan, cores())
