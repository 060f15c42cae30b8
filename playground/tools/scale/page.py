"""The command `scale`: alpha, beta and gamma, measured or given, and the predictions for any number
of ranks: as text, and as tables of the fastest algorithms. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine
from playground.base.remote import remote
from playground.tools import TOOLS
from playground.tools.scale.fit import evaluate
from playground.tools.scale.plan import COSTS, EFFORT, Plan
from playground.tools.scale.results import (
    Point,
    Prediction,
    Result,
    predict_cluster,
    samples_of,
)
from playground.tools.scale.settings import DEFAULT_RANKS, ScaleSettings
from playground.ui.options import pack_options, refuse
from playground.ui.session import Session, session_command
from playground.ui.tables import Column, Table, Texts, named_numbers, tabulate
from playground.ui.text import heading, prose
from playground.ui.units import format_bytes, format_digits, format_seconds
from playground.world.rank.reports import Event

TOOL = TOOLS["scale"]
MEASURE = remote("playground.tools.scale.samples:measure")
SHORT = {name: ALGORITHMS[name].short_name or name for name in COSTS}
"""Names of algorithms that fit into a cell."""
MAX_COLUMNS = 4
"""Numbers of ranks in a table; the others are shown with --wide."""


def result_texts(result: Result) -> Texts:
    """The machine, how well the model describes it, which algorithm is the fastest on it, and what
    has been said."""
    node = result.parameters.ranks_per_node
    texts: Texts = [*machine_lines(result.parameters)]
    if result.fit:
        about = (
            "The error of predictions, relative to measurements that the model was not fitted to:"
        )
        texts += [
            "",
            about,
            errors_table([point for point in result.fit.points if not point.fitted]),
        ]
    nodes = f"{node} ranks per node, " if node > 1 else ""
    about = f", {nodes}every rank with its own cores and its own link"
    texts += ["", prose(heading("A cluster with this latency and bandwidth"), about)]
    return [*texts, *winners_texts(result.predictions), "", summary_text(result)]


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
    """The groups that are measured."""
    fitted, held_out = (
        " and ".join(dict.fromkeys(str(len(ranks)) for ranks in groups))
        for groups in (
            [group.ranks for group in plan.groups if group.fitted],
            [group.ranks for group in plan.groups if group.held_out],
        )
    )
    hosts = f"Hosts: {plan.hosts} with {plan.ranks_per_host} each. " if plan.hosts > 1 else ""
    return (
        f"{hosts}Fitted to groups of {fitted} ranks, checked on other sizes and groups of "
        f"{held_out}, measured for "
        f"{plan.seconds:g} s."
    )


def errors_table(points: Sequence[Point]) -> Table:
    """Errors of predictions: one row per algorithm, and one for all together."""
    groups: dict[str, list[float]] = {}
    for point in points:
        groups.setdefault(point.algorithm, []).append(abs(point.error))
    groups["all"] = [abs(point.error) for point in points]
    rows = (
        {"algorithm": name, "median": median(each), "worst": max(each)}
        for name, each in groups.items()
    )
    return tabulate(rows, ERRORS)


ERRORS = {
    "algorithm": Column("algorithm"),
    **named_numbers(
        ("median", "median\nerror", "%", ".0f", 100), ("worst", "worst\nerror", "%", ".0f", 100)
    ),
}


def winners_texts(predictions: Sequence[Prediction]) -> Texts:
    """The meaning of a cell, the short names with the full ones, and the table of the fastest
    algorithms: one row per size, one column per number of ranks; without --wide, `MAX_COLUMNS` of
    them, the first and the last included."""
    winners = {row.winner for row in predictions}
    pairs = [
        f"{short} = {name}" for name, short in SHORT.items() if name in winners and short != name
    ]
    ranks = list(dict.fromkeys(row.world_size for row in predictions))
    shown = [
        ranks[ceil((len(ranks) - 1) * place / (MAX_COLUMNS - 1))] for place in range(MAX_COLUMNS)
    ]
    columns = {str(size): Column(f"{size:,} ranks", "us", wide=size not in shown) for size in ranks}
    rows: dict[int, dict[str, str]] = {}
    for row in predictions:
        cells = rows.setdefault(row.size, {"size": format_bytes(row.size)})
        cells[str(row.world_size)] = (
            f"{SHORT[row.winner]} {format_digits(1e6 * row.seconds[row.winner])}"
        )
    names = ", ".join(pairs) + ("." if pairs else "")
    about = f"Per cell: the fastest algorithm, and its time in us. {names}"
    return [about, tabulate(rows.values(), {"size": Column("size", right=True), **columns})]


def summary_text(result: Result) -> str:
    """The last line: what was predicted, and how well."""
    sizes = [row.size for row in result.predictions]
    ranks = [row.world_size for row in result.predictions]
    moved = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    what = f"Predicted: all-reduce of {moved} on {min(ranks):,} to {max(ranks):,} ranks"
    if result.fit is None or result.measured is None:
        return f"{what}, from parameters as given."
    where = "these hosts" if result.measured.hosts > 1 else "this host"
    return f"{what}; on {where} predictions are off by {result.fit.median_error:.0%} (median)."


def per_byte(seconds: float) -> str:
    """Seconds per byte, and the bandwidth that this is."""
    return f"{seconds * 1e9:.3g} ns per byte" + (f", {1e-9 / seconds:.3g} GB/s" if seconds else "")


WITHOUT_RANKS = "has no effect with --alpha and --beta, which start no ranks: leave it out"


@session_command(
    TOOL.name,
    pack_options("settings", ScaleSettings),
    refuse(
        "timeout",
        why=lambda given: "" if None in (given["alpha"], given["beta"]) else WITHOUT_RANKS,
    ),
    only=("timeout", "wide", "as_json"),
    size=DEFAULT_RANKS,
    short_help=TOOL.purpose,
)
def command(session: Session, settings: ScaleSettings) -> None:
    """Predict the time of every all-reduce algorithm from latency, bandwidth and the speed of
    addition.

    By default these are fitted to measurements on this host, and checked against other sizes and
    numbers of ranks. On several hosts (under torchrun), messages inside a host and between hosts
    have a latency and a bandwidth each. To predict for any other machine, give them as options;
    then nothing is measured.

    \b
        python -m playground scale
        python -m playground scale --alpha 5e-6 --beta 4e-11
    """
    session.run = replace(session.run, size=1 if settings.machine else settings.size)
    if settings.machine:
        session.say("scale: a cluster with these parameters")
        result = predict_cluster(settings.machine)
    else:
        result = measure(session)
    session.say(*result_texts(result))
    session.print_document({}, **vars(result))


def measure(session: Session) -> Result:
    """Measure this world, fit the model to it, and check it."""
    session.say(f"scale: {session.world}")
    session.world.warm_up(MEASURE)

    def on_report(rank: int, event: Event) -> None:
        if rank == 0 and "plan" in event:
            session.say(plan_text(event["plan"]))

    by_rank = session.launch(MEASURE, EFFORT, on_report=on_report)
    plan, _ = by_rank[0]  # the same on all ranks
    return evaluate(samples_of([seconds for _, seconds in by_rank], plan), plan)
