"""The terminal: how wide it is, and how text gets there, and a bar. Does not import rich before it
prints.

| environment           | what follows                                                      |
|-----------------------|-------------------------------------------------------------------|
| COLUMNS               | the width; else the terminal's; 80 where there is none            |
| NO_COLOR              | no colour, no bold: not one escape sequence                       |
| FORCE_COLOR           | colour in a pipe too                                              |
| TERM=dumb, a pipe     | no colour and no bars                                             |

A bar on stderr shows what is being done, while something takes long; nothing where stderr is no
terminal. It takes what rank 0 reports: events with `phase`, and with `step` and `steps` where the
end is known. Text that is printed meanwhile appears above the bar. Afterwards the bar is gone.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from playground.ui.tables import Table
    from playground.ui.text import Prose
    from playground.world.rank.reports import Event

NARROWEST = 40
"""Columns: no terminal is taken to be narrower, because nothing would be legible."""


def width() -> int:
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def say(*texts: str | Prose | Table, wide: bool = False, err: bool = False) -> None:
    """Print each on lines of its own to stdout, or plain to stderr: prose wrapped at the terminal's
    width, tables within it unless `wide`. While a bar is shown, it appears above the bar: it is
    written to `sys.stdout`, which the bar has in its hands."""
    from playground.ui.rendering import render

    stream = sys.stderr if err else sys.stdout
    stream.write(render(texts, width(), wide=wide, colour=False if err else None))
    stream.flush()


def is_same_terminal() -> bool:
    """Whether stdout and stderr are one terminal, so that a bar on the one would run into the text
    on the other."""
    try:
        return sys.stdout.isatty() and os.path.sameopenfile(
            sys.stdout.fileno(), sys.stderr.fileno()
        )
    except (OSError, ValueError):
        return False


class Bar:
    """Use as a context manager, so that no half-drawn bar is left behind. It is drawn once there is
    something to show; `shown` False: never."""

    def __init__(self, shown: bool = True) -> None:
        can_draw = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        self.shown = shown and can_draw and sys.stderr.isatty()
        self.progress: Progress | None = None

    def show(self, phase: str, done: float = 0, total: float | None = None) -> None:
        """Show what is being done, and how much of it is; without `total` the bar only moves."""
        if not self.shown:
            return
        if self.progress is None:
            self.progress = start_progress()
            self.progress.add_task(phase, total=None)
        [task] = self.progress.tasks
        # other work, and not the next phase of the same
        if total != task.total or done < task.completed:
            self.progress.reset(task.id, total=total, completed=int(done))
        self.progress.update(task.id, description=phase, completed=done, total=total)

    def announce(self, line: str) -> None:
        """Say on stderr what takes time, and show it."""
        click.echo(line, err=True)
        self.show(line)

    def __call__(self, rank: int, event: Event) -> None:
        """Take a report, as `CommandWorld.run` hands it on."""
        if rank == 0 and "phase" in event:
            self.show(event["phase"], event.get("step", 0), event.get("steps"))

    def clear(self) -> None:
        """Take the bar off the terminal, until there is something to show again."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def start_progress() -> Progress:
    """A bar of rich's on stderr. Output to stdout goes through it, if that is the same terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    phase, share = (
        TextColumn(text, markup=False)
        for text in ("{task.description}", "{task.percentage:>3.0f} %")
    )
    progress = Progress(
        *(phase, BarColumn(bar_width=None), share, TimeElapsedColumn()),
        console=Console(stderr=True, no_color=None, markup=False, highlight=False, emoji=False),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=is_same_terminal(),
    )
    progress.start()
    return progress
