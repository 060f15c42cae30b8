"""What the lesson `ladder` has measured: a row a rung, what its columns mean, and a bar a rung."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playground.show import plots
from playground.show.results import table

ABOUT = {
    "per-parameter": "one all_reduce a parameter, after backward: the tutorial's loop",
    "none-safe": "the same, and a gradient that is None takes part as zero",
    "flat": "one all_reduce for all gradients, copied into one message",
    "bucketed": "one all_reduce a bucket of gradients, the last layers' first",
    "overlapped": "each bucket leaves as soon as its gradients are there, while backward goes on",
    "ddp": "DistributedDataParallel, which does that in C++",
}
"""What each rung changes."""
PARTS = ("forward", "backward", "exposed", "step")
"""Of a step, as they are stacked."""
LEGEND = """\
  p50, p95: ms a step takes on its slowest rank. Its parts, medians on the rank that came last to the averaging:
  forward; backward, to the last gradient; exposed, from there until all are averaged (packing, waiting); step.
  alone: ms the same averaging takes with no backward to hide behind; hidden: the share of it that was not exposed;
  early: the share of the bytes that leave before the last gradient is there, without which nothing can be hidden.
  x first, x ddp: how many times as fast as the first rung, as ddp. off ddp: largest difference of parameters to ddp's,
  which is rounding; where rounding decides which of two numbers is the larger (ReLU, max_pool), it grows."""


def rungs_text() -> str:
    """A line a rung."""
    return "\n".join(table([[name, about] for name, about in ABOUT.items()]))


def table_text(rungs: list[dict[str, Any]]) -> str:
    """A row a rung, and what the columns mean."""
    rows = [
        [
            "rung", "p50", "p95", *PARTS, "alone", "hidden", "early", "messages", "bytes", "x first", "x ddp", "loss",
            "off ddp",
        ]
    ]  # fmt: skip
    for rung in rungs:
        times = [f"{1000 * rung[name]:.2f}" for name in ("p50", "p95", *PARTS, "alone")]
        shares = [f"{rung['hidden']:.0%}", f"{rung['early_bytes'] / rung['bytes']:.0%}"]
        counts = [f"{rung['messages']}", f"{rung['bytes']:,}"]
        speeds = [f"{rung['speed_to_first']:.2f}", f"{rung['speed_to_ddp']:.2f}"]
        ends = [f"{rung['loss']:.4f}", f"{rung['difference_to_ddp']:.1e}" if rung["difference_to_ddp"] else "0"]
        rows.append([rung["rung"], *times, *shares, *counts, *speeds, *ends])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [[name, *map(str.rjust, figures, widths[1:])] for name, *figures in rows]
    return "\n".join([*table(rows), LEGEND])


def fastest_text(rungs: list[dict[str, Any]]) -> str:
    """How the fastest rung compares with the first, and with DistributedDataParallel."""
    first, *_, ddp = rungs
    fastest = min(rungs[:-1], key=lambda rung: rung["p50"])
    return (
        f"the fastest here, {fastest['rung']}, is {fastest['speed_to_first']:.2f} times as fast as "
        f"{first['rung']} and {fastest['speed_to_ddp']:.2f} times as fast as {ddp['rung']}"
    )


def plot(rungs: list[dict[str, Any]], title: str, file: Path) -> None:
    """A bar a rung: the parts of a step, on top of each other."""
    figure, axes = plots.new_axes(title, "", "ms a step")
    names, heights = [rung["rung"] for rung in rungs], [0.0] * len(rungs)
    for part in PARTS:
        times = [1000 * rung[part] for rung in rungs]
        axes.bar(names, times, 0.7, heights, label="exposed communication" if part == "exposed" else part)
        heights = [height + time for height, time in zip(heights, times, strict=True)]
    figure.legend(loc="outside upper right", ncols=len(PARTS))
    plots.save(figure, file)
