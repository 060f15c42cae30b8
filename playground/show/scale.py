"""The cost model as text, as tables of who wins where, and as a map of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from playground.show import plots
from playground.show.results import table

SHORT = {
    "reduce-broadcast": "root",
    "all-to-all": "all",
    "tutorial-ring": "tutorial",
    "ring": "ring",
    "recursive-doubling": "doubling",
    "halving-doubling": "halving",
    "binary-tree": "tree",
}
"""Names of algorithms that fit into a cell."""
COLUMNS = 6
"""Of a table, at most."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
POWERS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = next(((scale, unit) for scale, unit in UNITS if seconds >= scale), UNITS[-1])
    return f"{seconds / scale:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"


def amount(nbytes: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in POWERS if nbytes >= scale)
    return f"{nbytes / scale:g} {unit}"


def prices_text(prices: dict[str, Any]) -> str:
    """What a message, a byte and an addition cost."""
    lines = [f"alpha {duration(prices['alpha'])} a message", f"beta {per_byte(prices['beta'])}"]
    lines.append(f"gamma {per_byte(prices['gamma'])} added or copied")
    if prices["ranks_per_node"] > 1:
        inner = f"alpha {duration(prices['inner_alpha'])}, beta {per_byte(prices['inner_beta'])}"
        lines.append(f"inside nodes of {prices['ranks_per_node']} ranks: {inner}")
    return "\n".join(f"  {line}" for line in lines)


def per_byte(seconds: float) -> str:
    """Seconds a byte, and the bandwidth that this is."""
    return f"{seconds * 1e9:.3g} ns a byte" + (f" ({1e-9 / seconds:.3g} GB/s)" if seconds else "")


def errors_text(points: Sequence[dict[str, Any]]) -> str:
    """How far predictions were from what was measured: a row an algorithm, and all together."""
    by_name: dict[str, list[float]] = {}
    for point in points:
        by_name.setdefault(point["algorithm"], []).append(abs(point["error"]))
    by_name["all"] = [abs(point["error"]) for point in points]
    rows = [["algorithm", "median error", "worst error"]]
    rows += [[name, f"{median(errors):.0%}", f"{max(errors):.0%}"] for name, errors in by_name.items()]
    return "\n".join(table(rows))


def winners_text(predictions: Sequence[dict[str, Any]]) -> str:
    """Who is the fastest, and how fast: a row a size, a column a number of ranks, as many as fit."""
    ranks = list(dict.fromkeys(row["world_size"] for row in predictions))
    ranks = ranks[:: ceil(len(ranks) / COLUMNS)]
    rows = [["", *(f"{size:,} ranks" for size in ranks)]]
    for nbytes in dict.fromkeys(row["size"] for row in predictions):
        cells = [row for row in predictions if row["size"] == nbytes and row["world_size"] in ranks]
        rows.append(
            [amount(nbytes), *(f"{SHORT[row['winner']]} {duration(row['seconds'][row['winner']])}" for row in cells)]
        )
    return "\n".join(table(rows))


def measured_text(
    prices: dict[str, Any], unseen: Sequence[dict[str, Any]], host: Sequence[dict[str, Any]],
    cluster: Sequence[dict[str, Any]],
) -> str:  # fmt: skip
    """What was fitted, how well it predicts, and what."""
    cores = f"{prices['cores']} core{'s' * (prices['cores'] > 1)}"
    return "\n".join([
        prices_text(prices),
        "\nPredictions against measurements, in groups and at sizes that were not fitted to:",
        errors_text(unseen),
        f"\nThe fastest on this host, all ranks on its {cores}:",
        winners_text(host),
        "",
        cluster_text(cluster),
    ])  # fmt: skip


def cluster_text(predictions: Sequence[dict[str, Any]]) -> str:
    """Who is the fastest on a cluster."""
    head = "The fastest on a cluster at these prices, every rank with its own cores and its own link:"
    return "\n".join([head, winners_text(predictions), legend()])


def legend() -> str:
    """What the short names in the tables stand for."""
    return "Names: " + ", ".join(f"{short} = {name}" for name, short in SHORT.items() if short != name) + "."


def map_plot(predictions: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Who wins where: a field for each number of ranks and size, in the colour of the fastest algorithm."""
    figure, axes = plots.new_axes(title, "ranks", "size (bytes)")
    for name in SHORT:
        won = [(row["world_size"], row["size"]) for row in predictions if row["winner"] == name]
        if won:
            axes.scatter(*zip(*won, strict=True), marker="s", s=240, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    figure.legend(loc="outside right upper")
    plots.save(figure, file)
