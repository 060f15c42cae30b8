"""Results as figures: SVG or PNG, drawn by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playground.runtime.errors import Impossible

SUFFIXES = (".svg", ".png")


def check(file: Path) -> None:
    """Raise `Impossible` if no figure can be drawn or this file cannot be one, before anything is measured."""
    if file.suffix not in SUFFIXES:
        raise Impossible(f"--plot {file}: a figure is a file that ends in {' or '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise Impossible(f"--plot {file}: there is no such folder")
    new_axes("", "", "")


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """An empty figure and the axes in it. (Not made by pyplot, it needs no display.)"""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Impossible("--plot needs matplotlib: pip install 'playground[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, file: Path) -> None:
    """Write the figure, in the format that the file's suffix says."""
    try:
        figure.savefig(file)
    except OSError as error:
        raise Impossible(f"--plot {file} cannot be written: {error.strerror}") from None


def bandwidth_plot(result: dict[str, Any], file: Path) -> None:
    """Bus bandwidth over size: a line for each collective and algorithm, and one for the wire if it was measured."""
    title = f"{result['backend']} on {result['device']}, {result['world_size']} ranks"
    figure, axes = new_axes(title, "size (bytes)", "bus bandwidth (GB/s)")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        lines.setdefault(f"{row['collective']} {row['algorithm']}", []).append((row["size"], row["busbw"]))
    for row in (result["limit"] or {"rows": []})["rows"]:
        lines.setdefault(f"limit ({row['collective']})", []).append((row["size"], row["busbw"]))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle=":" if "limit" in label else "-")
    axes.set_xscale("log", base=2)
    axes.legend()
    save(figure, file)
