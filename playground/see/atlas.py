"""All figures, or some, from runs that are each made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.temporary_folder import temporary_folder
from playground.see.paint.paint import paint_scene
from playground.see.paint.results import Evidence
from playground.see.paint.runs import RUNS
from playground.see.paint.table import ALL, FIGURES, Figure

ROOT = Path(__file__).parents[2]
"""The folder that the package lies in."""
Show = Callable[[str, int, int], None]
"""Is called with what is being done, how many runs are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class PaintedFigure:
    """A figure that is on the disk."""

    name: str
    shows: str
    run: str
    file: Path


def paint_figures(files: dict[str, Path], show: Show) -> list[PaintedFigure]:
    """Paint figures, given by name, into these files, in the order of the runs they are drawn from.

    Raises `UsageError` for a file that cannot be written, and what `launch` raises.
    """
    chosen = [ALL[name] for name in files]
    runs = [*dict.fromkeys(figure.run for figure in chosen)]
    with temporary_folder("figures") as folder:
        for number, run in enumerate(runs):
            show(f"running {run}", number, len(runs))
            evidence = RUNS[run].make(folder)
            paint_from(evidence, [figure for figure in chosen if figure.run == run], files)
    return [
        PaintedFigure(name=figure.name, shows=figure.shows, run=figure.run, file=files[figure.name])
        for figure in chosen
    ]


def paint_from(evidence: Evidence, figures: Sequence[Figure], files: dict[str, Path]) -> None:
    for figure in figures:
        paint_scene(figure.draw(evidence), files[figure.name])


def all_files(folder: Path) -> dict[str, Path]:
    """Where all figures of the tutorials go to in a folder, as SVG."""
    return {figure.name: folder / f"{figure.name}_{figure.file}.svg" for figure in FIGURES.values()}


def chapter_files(root: Path = ROOT) -> dict[str, Path]:
    """Where the pictures of the chapters' READMEs are, by the figure's name."""
    return {figure.name: root / figure.chapter / "figures" / f"{figure.file}.svg" for figure in ALL.values()}
