"""The command that predicts: alpha, beta and gamma, measured or given, and what they mean for any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from playground.cli.options import Finite, json_option, options, plot_option, speaker, timeout_option
from playground.measure import fit as fitting, predict
from playground.measure.costs import COSTS
from playground.measure.model import Machine
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible
from playground.runtime.host import cores
from playground.show import plots, results, scale as show

LEAST, USUAL, MOST = 4, 8, 16
"""Ranks to measure with. More would need much memory: all-to-all has N² tensors under way."""
MEASURED = 20.0
"""Seconds of rounds that begin."""
price = Finite(0, min_open=True)
scale_options = options(
    click.option(
        "-n", "--world-size", "size", type=click.IntRange(LEAST, MOST), show_default=str(USUAL),
        help="Ranks to measure with.",
    ),
    click.option("--alpha", type=price, help="Seconds a message costs. With --beta: measure nothing, take these."),
    click.option("--beta", type=price, help="Seconds a byte costs: 1e-10 is 10 GB/s."),
    click.option("--gamma", type=Finite(0), show_default="0", help="Seconds a byte costs to be added."),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Two levels: --alpha and --beta are between nodes."),
    click.option("--inner-alpha", type=price, help="Seconds a message costs inside a node."),
    click.option("--inner-beta", type=price, help="Seconds a byte costs inside a node."),
    timeout_option,
    plot_option("who wins"),
    json_option,
)  # fmt: skip


@click.command("scale", short_help="predict all-reduce on up to 65,536 ranks, and check the model against this host")
@scale_options
def scale_command(size: int | None, timeout: float, plot: Path | None, as_json: bool, **prices: Any) -> None:
    """Predict what every algorithm for all-reduce takes, from the price of a message, of a byte and of an addition.

    The prices are fitted to short measurements on this host, and tried on sizes and groups that they were not fitted
    to. Or they are given, for a cluster of any kind: then nothing is measured.

    \b
        python -m playground scale
        python -m playground scale --alpha 5e-6 --beta 4e-11
        python -m playground scale --alpha 5e-6 --beta 4e-11 --ranks-per-node 8 --inner-alpha 2e-6 --inner-beta 3e-12
    """
    started = time.perf_counter()
    given = by_hand(size, **prices)
    world = World(size, usual_size=1 if given else USUAL, timeout=timeout)
    if plot:
        plots.check(plot)
    say = speaker(world, silent=as_json)
    content = given_content(given, say) if given else measured_content(world, say)
    if not world.speaks:
        return
    if plot:
        show.map_plot(content["predictions"]["cluster"], "the fastest all-reduce on a cluster", plot)
    if as_json:
        click.echo(results.document("scale", world, started, {}, **content))


def by_hand(
    size: int | None, alpha: float | None, beta: float | None, gamma: float | None, ranks_per_node: int | None,
    inner_alpha: float | None, inner_beta: float | None,
) -> Machine | None:  # fmt: skip
    """The cluster whose prices are given; None if they are to be measured. Raises `Impossible` for half of one."""
    inner = (ranks_per_node, inner_alpha, inner_beta)
    if (alpha is None) != (beta is None):
        raise Impossible("--alpha and --beta belong together: give both, or neither to have them measured")
    if alpha is None or beta is None:
        if gamma is not None or any(each is not None for each in inner):
            raise Impossible("--gamma, --ranks-per-node and --inner-… go with given prices: add --alpha and --beta")
        return None
    if size is not None:
        raise Impossible(f"-n {size} with --alpha and --beta: nothing is measured then, leave -n out")
    if ranks_per_node is None or inner_alpha is None or inner_beta is None:
        if any(each is not None for each in inner):
            raise Impossible("--ranks-per-node, --inner-alpha and --inner-beta belong together: give all three")
        return Machine(alpha, beta, gamma or 0)
    if inner_alpha > alpha or inner_beta > beta:
        raise Impossible("a message inside a node dearer than one between nodes: the inner prices must not be higher")
    return Machine(alpha, beta, gamma or 0, None, ranks_per_node, inner_alpha, inner_beta)


def given_content(machine: Machine, say: Callable[[str], None]) -> dict[str, Any]:
    """Predictions for prices that were given."""
    prices = asdict(machine)
    cluster = predict.predictions(machine, predict.CLUSTER)
    say(f"scale: a cluster, as given\n{show.prices_text(prices)}\n\n{show.cluster_text(cluster)}")
    return {"parameters": prices, "fit": None, "predictions": {"host": None, "cluster": cluster}}


def measured_content(world: World, say: Callable[[str], None]) -> dict[str, Any]:
    """Prices measured here, how well they predict what they were not fitted to, and what they predict."""
    if not LEAST <= world.size <= MOST or world.local_size != world.size:
        raise Impossible(
            f"{world.size} ranks, {world.local_size} of them here: measuring takes {LEAST} to {MOST} on one host; "
            f"for a cluster give --alpha and --beta"
        )
    fitted, held_out = fitting.groups(world.size)
    say(f"scale: {world}; groups of {listed(fitted)} to fit, of {listed(held_out)} to check, {MEASURED:g} s …")
    server.preload("playground.measure.samples")
    world.warm_up()
    plan = dict.fromkeys(fitted, fitting.FITTED_SIZES) | dict.fromkeys(held_out, fitting.HELD_OUT_SIZES)
    samples = fitting.samples_of(world.run(start, plan, MEASURED))
    host = fitting.fit([sample for sample in samples if sample.size in fitted], cores())
    points = [
        asdict(sample) | {"error": fitting.error(host, sample), "fitted": sample.size in fitted} for sample in samples
    ]
    unseen = [point for point in points if not point["fitted"]]
    on_host = predict.predictions(host, predict.HOST)
    cluster = predict.predictions(Machine(host.alpha, host.beta, host.gamma), predict.CLUSTER)
    say(show.measured_text(asdict(host), unseen, on_host, cluster))
    errors = [abs(point["error"]) for point in unseen]
    return {
        "parameters": asdict(host),
        "fit": {"points": points, "median_error": median(errors), "worst_error": max(errors)},
        "predictions": {"host": on_host, "cluster": cluster},
    }


def start(rank: int, size: int, plan: dict[int, list[int]], seconds: float) -> Any:
    """What a rank runs, found only there, where torch is."""
    from playground.measure.samples import measure

    return measure(rank, size, list(COSTS), plan, seconds)


def listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
