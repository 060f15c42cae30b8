"""The figure of a benchmark: bus bandwidth against size, drawn by matplotlib where it is
installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from playground.base.errors import UsageError
from playground.base.files import writing
from playground.tools.bench.results import Row
from playground.tools.bench.settings import MEMORY
from playground.ui.paths import check_writable
from playground.ui.units import format_bytes

SUFFIXES = (".svg", ".png")
MAX_TICKS = 12
"""Ticks on the axis of sizes: more labels would run into each other."""


def check(file: Path, size: int) -> None:
    """Raise `UsageError` if no figure can be drawn or this file cannot be one, before anything is
    measured."""
    if file.suffix not in SUFFIXES:
        raise UsageError(f"--plot {file}: a figure is a file that ends in {' or '.join(SUFFIXES)}")
    if size == 1:
        raise UsageError("--plot with 1 rank: nothing moves, its bandwidth is 0; use at least -n 2")
    check_writable("--plot", file)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'playground[plot]'") from None


def plot_bandwidth(title: str, rows: Sequence[Row], file: Path) -> None:
    """A line for each collective and algorithm. (Not by pyplot, so it needs no display.)"""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="size", ylabel="bus bandwidth (GB/s)")
    axes.grid(alpha=0.3)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(f"{row.collective}, {row.algorithm}", []).append((row.size, row.busbw))
    for label, points in lines.items():
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=label,
            linestyle=":" if label.endswith(MEMORY) else "-",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    sizes = sorted({row.size for row in rows})
    # every second, third, … of them where there are too many
    ticks = sizes[:: -(-len(sizes) // MAX_TICKS)]
    axes.set_xticks(ticks, labels=[format_bytes(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.legend()
    with writing(file) as opened:
        figure.savefig(opened, format=file.suffix.removeprefix("."))
