"""Results as figures: SVG or PNG, drawn by matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playground.console.options import check_writable
from playground.runtime.errors import UsageError

SUFFIXES = (".svg", ".png")


def check(file: Path) -> None:
    """Raise `UsageError` if no figure can be drawn or this file cannot be one, before anything is measured."""
    if file.suffix not in SUFFIXES:
        raise UsageError(f"--plot {file}: a figure is a file that ends in {' or '.join(SUFFIXES)}")
    check_writable("--plot", file)
    new_axes("", "", "")


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """An empty figure and the axes in it. (Not made by pyplot, it needs no display.)"""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'playground[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file)
    except OSError as error:
        raise UsageError(f"--plot {file} cannot be written: {error.strerror}") from None
