"""Options of commands whose training can be interrupted: snapshots, what to go on from, restarts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from playground.console.dependent_options import ANY, only_with
from playground.console.options import Finite, pack_options
from playground.console.paths import FilePath
from playground.training.snapshots.settings import AUTO, NO, SnapshotSettings

MAX_RESTARTS = 1000


class Interval(NamedTuple):
    """Between two snapshots: so many steps or, where it is not None, so many seconds."""

    steps: int
    seconds: float | None = None


class StepsOrSeconds(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no type arguments here
    """`100` for steps, `30s` for seconds."""

    name = "steps or seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Interval:
        match = re.fullmatch(r"(?a:(\d{1,9})|(\d{1,9}(?:\.\d{1,9})?)s)", str(value))
        steps, seconds = match.groups() if match else (None, None)
        if steps and int(steps):
            return Interval(int(steps))
        if seconds and float(seconds):
            return Interval(SnapshotSettings.every, float(seconds))
        self.fail(f"{value!r} is neither a number of steps, such as 100, nor of seconds, such as 30s.", param, ctx)


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """What is to survive a failure, and how often one is."""

    snapshots: Path | None
    snapshot_every: Interval
    keep: int
    resume: str
    restarts: int
    grace: float

    @property
    def settings(self) -> SnapshotSettings | None:
        """As a training run takes them."""
        if self.snapshots is None:
            return None
        return SnapshotSettings(
            folder=self.snapshots.absolute(), every=self.snapshot_every.steps, seconds=self.snapshot_every.seconds,
            keep=self.keep, resume=self.resume,
        )  # fmt: skip

    @property
    def grace_of_ranks(self) -> float | None:
        """Seconds they have when they are asked to end; None where they could store nothing."""
        return None if self.snapshots is None else self.grace


snapshot_options = pack_options(
    "survival", SnapshotOptions,
    click.option(
        "--snapshots", type=FilePath(), metavar="DIR",
        help="Take snapshots of the training, in this folder, and go on from the newest.",
    ),
    click.option(
        "--snapshot-every", type=StepsOrSeconds(), default="100", show_default=True, metavar="STEPS|SECONDS",
        help="Steps, or seconds (as in 30s), between two snapshots.",
    ),
    click.option(
        "--keep", type=click.IntRange(1), default=3, show_default=True, metavar="K", help="Number of snapshots kept."
    ),
    click.option(
        "--resume", default=AUTO, show_default=True, metavar=f"{AUTO}|{NO}|PATH",
        help="auto: from the newest snapshot in the folder, if there is one; no: from the start, in a folder that has "
        "none; or from the snapshot at PATH.",
    ),
    click.option(
        "--restarts", type=click.IntRange(0, MAX_RESTARTS), default=0, show_default=True, metavar="K",
        help="How often to start all ranks anew after a failure.",
    ),
    click.option(
        "--grace", type=Finite(0, 1e6, min_open=True), default=30.0, show_default=True, metavar="SECONDS",
        help="Time for a last snapshot after SIGTERM or SIGUSR1, in seconds; then, exit code 75.",
    ),
    only_with("snapshot_every", "keep", "resume", "grace", snapshots=ANY),
)  # fmt: skip
"""Gives a command the argument `survival`: its `SnapshotOptions`."""
