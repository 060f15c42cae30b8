"""The cost model as text, as tables of the fastest algorithms, and as a map of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median

from playground.algorithms import ALGORITHMS
from playground.algorithms.cost_model import Machine
from playground.console import plots
from playground.console.tables import table
from playground.tools.scale.predict import COSTS
from playground.tools.scale.results import Fit, Point, Prediction, ScaleResult

SHORT = {name: ALGORITHMS[name].short_name or name for name in COSTS}
"""Names of algorithms that fit into a cell."""
MAX_COLUMNS = 6
"""Of a table."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
POWERS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def result_text(result: ScaleResult) -> str:
    """The machine, how well the model describes it, and who is the fastest on it."""
    machine, fit, host = result.parameters, result.fit, result.predictions.host
    cluster = cluster_text(result.predictions.cluster)
    if fit is None or host is None:
        return f"{machine_text(machine)}\n\n{cluster}"
    return "\n".join([machine_text(machine), fit_text(fit), host_text(host, machine.cores or 1), "", cluster])


def machine_text(machine: Machine) -> str:
    """The latency of a message, the bandwidth, and the speed of adding."""
    lines = [f"alpha {duration(machine.alpha)} per message", f"beta {per_byte(machine.beta)}"]
    lines.append(f"gamma {per_byte(machine.gamma)} added or copied")
    if machine.ranks_per_node > 1:
        inner = f"alpha {duration(machine.inner_alpha)}, beta {per_byte(machine.inner_beta)}"
        lines.append(f"inside nodes of {machine.ranks_per_node} ranks: {inner}")
    return "\n".join(f"  {line}" for line in lines)


def fit_text(fit: Fit) -> str:
    heading = "\nPredictions against measurements, in groups and at sizes that were not fitted to:"
    return f"{heading}\n{errors_text(fit.unseen)}"


def host_text(predictions: Sequence[Prediction], cores: int) -> str:
    """Who is the fastest on this host."""
    heading = f"\nThe fastest on this host, all ranks on its {cores} core{'s' * (cores > 1)}:"
    return f"{heading}\n{winners_text(predictions)}"


def cluster_text(predictions: Sequence[Prediction]) -> str:
    """Who is the fastest on a cluster."""
    heading = (
        "The fastest on a cluster with this latency and bandwidth, every rank with its own cores and its own link:"
    )
    return "\n".join([heading, winners_text(predictions), legend()])


def errors_text(points: Sequence[Point]) -> str:
    """How far predictions were from what was measured: one row per algorithm, and all together."""
    by_name: dict[str, list[float]] = {}
    for point in points:
        by_name.setdefault(point.algorithm, []).append(abs(point.error))
    by_name["all"] = [abs(point.error) for point in points]
    rows = [["algorithm", "median error", "worst error"]]
    rows += [[name, f"{median(errors):.0%}", f"{max(errors):.0%}"] for name, errors in by_name.items()]
    return "\n".join(table(rows))


def winners_text(predictions: Sequence[Prediction]) -> str:
    """Who is the fastest, and how fast: one row per size, one column per number of ranks, as many as fit."""
    ranks = list(dict.fromkeys(row.world_size for row in predictions))
    ranks = ranks[:: ceil(len(ranks) / MAX_COLUMNS)]
    rows = [["", *(f"{size:,} ranks" for size in ranks)]]
    for nbytes in dict.fromkeys(row.size for row in predictions):
        cells = [row for row in predictions if row.size == nbytes and row.world_size in ranks]
        rows.append([amount(nbytes), *(f"{SHORT[row.winner]} {duration(row.seconds[row.winner])}" for row in cells)])
    return "\n".join(table(rows))


def legend() -> str:
    """What the short names in the tables stand for."""
    return "Names: " + ", ".join(f"{short} = {name}" for name, short in SHORT.items() if short != name) + "."


def map_plot(predictions: Sequence[Prediction], title: str, file: Path) -> None:
    """Who is the fastest where: one field per number of ranks and size, in the colour of the fastest algorithm."""
    figure, axes = plots.new_axes(title, "ranks", "size (bytes)")
    for name in SHORT:
        won = [(row.world_size, row.size) for row in predictions if row.winner == name]
        if won:
            axes.scatter(*zip(*won, strict=True), marker="s", s=240, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    figure.legend(loc="outside right upper")
    plots.save(figure, file)


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = next(((scale, unit) for scale, unit in UNITS if seconds >= scale), UNITS[-1])
    return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"


def amount(nbytes: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in POWERS if nbytes >= scale)
    return f"{nbytes / scale:g} {unit}"


def per_byte(seconds: float) -> str:
    """Seconds per byte, and the bandwidth that this is."""
    return f"{seconds * 1e9:.3g} ns per byte" + (f" ({1e-9 / seconds:.3g} GB/s)" if seconds else "")
