"""A bar on stderr while something takes long, with what is being done; nothing where stderr is no terminal.

    with session.bar() as bar:
        bar.show("drawing digits", 1200, 70000)     # phase, how much is done, of how much
        session.world.run(WORK, on_report=bar)      # ranks call report(phase="measuring 1 MiB", step=3, steps=20)

A bar takes what rank 0 reports: events with `phase`, and with `step` and `steps` where the end is known. Text that is
printed meanwhile, by this process or by a rank, appears above the bar. Afterwards the bar is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from playground.console import terminal
from playground.runtime.rank import Event

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Use as a context manager, so that no half-drawn bar is left behind. It is drawn once there is something to show;
    `shown` False: never."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown and terminal.has_bars()
        self.progress: Progress | None = None

    def show(self, phase: str, done: float = 0, total: float | None = None) -> None:
        """Show what is being done, and how much of it is; without `total` the bar only moves."""
        if not self.shown:
            return
        if self.progress is None:
            self.progress = start_progress()
            self.progress.add_task(phase, total=None)
        [task] = self.progress.tasks
        if total != task.total or done < task.completed:  # other work, and not the next phase of the same
            self.progress.reset(task.id, total=total, completed=int(done))
        self.progress.update(task.id, description=phase, completed=done, total=total)

    def announce(self, line: str) -> None:
        """Say on stderr what takes time, and show it."""
        click.echo(line, err=True)
        self.show(line)

    def __call__(self, rank: int, event: Event) -> None:
        """Take a report, as `World.run` hands it on."""
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
    """A bar of rich's on stderr. What is then written to stdout goes through it, if that is the same terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    phase, share = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.percentage:>3.0f} %"))
    progress = Progress(
        *(phase, BarColumn(bar_width=None), share, TimeElapsedColumn()),
        console=Console(stderr=True, no_color=None, markup=False, highlight=False, emoji=False),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=terminal.is_same_terminal(),
    )
    progress.start()
    return progress
