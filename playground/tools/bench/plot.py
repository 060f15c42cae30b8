"""A benchmark as a figure: bus bandwidth against size, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from playground.console import plots
from playground.measurement.units import format_bytes
from playground.runtime.errors import UsageError
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.results import BenchResult
from playground.tools.bench.settings import BenchSettings

MAX_TICKS = 12
"""On the axis of sizes: more labels would run into each other."""


def check_plot(settings: BenchSettings, size: int, file: Path) -> None:
    """Raise `UsageError` if there will be nothing to draw, or no file to draw it in."""
    still = [name for name in settings.collectives if COLLECTIVES[name].factor(size) == 0]
    if still:
        raise UsageError(f"--plot with {size} rank: {still[0]} moves nothing, its bandwidth is 0; use at least -n 2")
    plots.check(file)


def bandwidth_plot(title: str, result: BenchResult, file: Path) -> None:
    """A line for each collective and algorithm, and one for the wire if it was measured."""
    figure, axes = plots.new_axes(title, "size", "bus bandwidth (GB/s)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        lines.setdefault(f"{row.collective}, {row.algorithm}", []).append((row.size, row.busbw))
    for wire_row in result.limit.rows if result.limit else []:
        lines.setdefault(f"limit ({wire_row.collective})", []).append((wire_row.size, wire_row.busbw))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle=":" if "limit" in label else "-")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    ticks = choose_ticks(sorted({row.size for row in result.rows}))
    axes.set_xticks(ticks, labels=[format_bytes(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.legend()
    plots.save(figure, file)


def choose_ticks(sizes: Sequence[int]) -> Sequence[int]:
    """The sizes that were measured; every second, third, … of them where there are too many."""
    return sizes[:: -(-len(sizes) // MAX_TICKS)]
