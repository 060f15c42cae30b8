"""The cost model as text, as tables of the fastest algorithms, and as a map of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine
from playground.console import plots
from playground.console.tables import Column, Table
from playground.console.text import Prose, heading, prose
from playground.measurement import format_bytes, format_digits, format_seconds
from playground.tools.scale.plan import COSTS, Fit, Plan, Point, Prediction, ScaleResult

SHORT = {name: ALGORITHMS[name].short_name or name for name in COSTS}
"""Names of algorithms that fit into a cell."""
MAX_COLUMNS = 4
"""Numbers of ranks in a table; the others are shown with --wide."""

Text = str | Prose | Table


def result_texts(result: ScaleResult) -> list[Text]:
    """The machine, how well the model describes it, which algorithm is the fastest on it, and what has been said."""
    plan, host, node = result.plan, result.predictions.host, result.parameters.ranks_per_node
    texts: list[Text] = [*machine_lines(result.parameters)]
    if plan and plan.hosts > 1:
        texts.append(links_text(plan))
    if result.fit:
        texts += fit_texts(result.fit)
    if plan and host:
        which, cores = "One host" if plan.hosts > 1 else "This host", plan.cores
        texts += ["", prose(heading(f"{which}, all ranks on its {cores} core{'s' * (cores > 1)}"))]
        texts += winners_texts(host)
    nodes = f"{node} ranks per node, " * (node > 1)
    about = f", {nodes}every rank with its own cores and its own link"
    texts += ["", prose(heading("A cluster with this latency and bandwidth"), about)]
    texts += winners_texts(result.predictions.cluster)
    return [*texts, "", summary_text(result)]


def machine_lines(machine: Machine) -> list[str]:
    """The latency of a message, the bandwidth, and the speed of adding."""
    lines = [
        f"  alpha: {format_seconds(machine.alpha)} per message (latency)",
        f"  beta: {per_byte(machine.beta)} (inverse bandwidth)",
        f"  gamma: {per_byte(machine.gamma)} added or copied",
    ]
    if machine.ranks_per_node > 1:
        inner = f"alpha {format_seconds(machine.inner_alpha)}, beta {per_byte(machine.inner_beta)}"
        lines.append(f"  within a node of {machine.ranks_per_node} ranks: {inner}")
    return lines


def plan_text(plan: Plan) -> str:
    """What is being measured."""
    if plan.hosts > 1:
        return (
            f"Hosts: {plan.hosts} with {plan.ranks_per_host} rank{'s' * (plan.ranks_per_host > 1)} each. Fitted to two "
            f"ranks of one host and to two of different hosts, checked on other sizes and larger groups, measured for "
            f"{plan.seconds:g} s."
        )
    fitted, held_out = (
        " and ".join(str(len(group.ranks)) for group in plan.groups if bool(group.fitted) is wanted)
        for wanted in (True, False)
    )
    return f"Fitted to groups of {fitted} ranks, checked on groups of {held_out}, measured for {plan.seconds:g} s."


def links_text(plan: Plan) -> str:
    """Which link is which."""
    between = next(group.ranks for group in plan.groups if group.node == 1)
    outer = f"alpha and beta are of the link between hosts, as ranks {between[0]} and {between[1]} have found it"
    if plan.ranks_per_host == 1:
        return f"  {outer}; inside a host nothing could be measured, with one rank on each"
    return f"  {outer}; those within a node, ranks 0 and 1"


def fit_texts(fit: Fit) -> list[Text]:
    about = "The error of predictions, relative to measurements that the model was not fitted to:"
    return ["", about, errors_table(fit.unseen)]


def errors_table(points: Sequence[Point]) -> Table:
    """How far predictions were from what was measured: one row per algorithm, per place if there are several, and for
    all together."""
    by_name: dict[str, list[float]] = {}
    for point in points:
        by_name.setdefault(point.algorithm, []).append(abs(point.error))
    places: dict[str, list[float]] = {}
    for point in points:
        places.setdefault(place_of(point), []).append(abs(point.error))
    if len(places) > 1:
        by_name |= places
    by_name["all"] = [abs(point.error) for point in points]
    table = Table(
        Column("algorithm"), Column("median\nerror", "%", right=True), Column("worst\nerror", "%", right=True)
    )
    for name, errors in by_name.items():
        table.add(name, f"{100 * median(errors):.0f}", f"{100 * max(errors):.0f}")
    return table


def place_of(point: Point) -> str:
    """Which links the messages of a group take."""
    if point.node == 1:
        return "between hosts"
    return "inside a host" if point.size <= point.node else "both"


def winners_texts(predictions: Sequence[Prediction]) -> list[Text]:
    """What a cell is, the names in the cells, and the table."""
    return [f"Per cell: the fastest algorithm, and its time in us. {legend(predictions)}", winners_table(predictions)]


def legend(predictions: Sequence[Prediction]) -> str:
    """What the short names in the table stand for."""
    winners = {row.winner for row in predictions}
    pairs = [f"{short} = {name}" for name, short in SHORT.items() if name in winners and short != name]
    return ", ".join(pairs) + "." * bool(pairs)


def winners_table(predictions: Sequence[Prediction]) -> Table:
    """Which algorithm is the fastest, and how fast: one row per size, one column per number of ranks."""
    ranks = list(dict.fromkeys(row.world_size for row in predictions))
    shown = evenly_spaced(ranks)
    table = Table(
        Column("size", right=True), *(Column(f"{size:,} ranks", "us", wide=size not in shown) for size in ranks)
    )
    for nbytes in dict.fromkeys(row.size for row in predictions):
        cells = [row for row in predictions if row.size == nbytes]
        times = [f"{SHORT[row.winner]} {format_digits(1e6 * row.seconds[row.winner])}" for row in cells]
        table.add(format_bytes(nbytes), *times)
    return table


def evenly_spaced(ranks: Sequence[int]) -> Sequence[int]:
    """As many as a table shows without --wide, the first and the last among them."""
    last = len(ranks) - 1
    return [ranks[ceil(last * position / (MAX_COLUMNS - 1))] for position in range(MAX_COLUMNS)]


def summary_text(result: ScaleResult) -> str:
    """The last line: what was predicted, and how well."""
    rows = result.predictions.cluster
    sizes, ranks = [row.size for row in rows], [row.world_size for row in rows]
    what = (
        f"Predicted: all-reduce of {format_bytes(min(sizes))} to {format_bytes(max(sizes))} "
        f"on {min(ranks):,} to {max(ranks):,} ranks"
    )
    if result.fit is None:
        return f"{what}, from parameters as given."
    where = "these hosts" if result.plan and result.plan.hosts > 1 else "this host"
    return f"{what}; on {where} predictions are off by {result.fit.median_error:.0%} (median)."


def map_plot(predictions: Sequence[Prediction], title: str, file: Path) -> None:
    """Which algorithm is the fastest where: one field per number of ranks and size, in the colour of the algorithm."""
    figure, axes = plots.new_axes(title, "ranks", "size")
    for name in SHORT:
        won = [(row.world_size, row.size) for row in predictions if row.winner == name]
        if won:
            axes.scatter(*zip(*won, strict=True), marker="s", s=240, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ranks, sizes = (
        sorted(each) for each in ({row.world_size for row in predictions}, {row.size for row in predictions})
    )
    axes.set_xticks(ranks, labels=[f"{size:,}" for size in ranks], rotation=45)
    axes.set_yticks(sizes, labels=[format_bytes(size) for size in sizes])
    figure.legend(loc="outside right upper")
    plots.save(figure, file)


def per_byte(seconds: float) -> str:
    """Seconds per byte, and the bandwidth that this is."""
    return f"{seconds * 1e9:.3g} ns per byte" + (f", {1e-9 / seconds:.3g} GB/s" if seconds else "")
