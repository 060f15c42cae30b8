"""Options of commands whose training can be interrupted: snapshots, what to go on from, restarts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from playground.console.dependent_options import ANY, only_with
from playground.console.options import pack_options
from playground.console.paths import FilePath
from playground.training.snapshots.settings import AUTO, NO, SnapshotSettings

MOST_RESTARTS = 1000


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """What is to survive a failure, and how often one is."""

    snapshots: Path | None
    snapshot_every: int
    keep: int
    resume: str
    restarts: int

    @property
    def settings(self) -> SnapshotSettings | None:
        """As a training run takes them."""
        if self.snapshots is None:
            return None
        return SnapshotSettings(
            folder=self.snapshots.absolute(), every=self.snapshot_every, keep=self.keep, resume=self.resume
        )


snapshot_options = pack_options(
    "survival", SnapshotOptions,
    click.option(
        "--snapshots", type=FilePath(), metavar="DIR",
        help="Take snapshots of the training, in this folder, and go on from the newest.",
    ),
    click.option(
        "--snapshot-every", type=click.IntRange(1), default=100, show_default=True, metavar="STEPS",
        help="Steps between two snapshots.",
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
        "--restarts", type=click.IntRange(0, MOST_RESTARTS), default=0, show_default=True, metavar="K",
        help="How often to start all ranks anew after a failure.",
    ),
    only_with("snapshot_every", "keep", "resume", snapshots=ANY),
)  # fmt: skip
"""Gives a command the argument `survival`: its `SnapshotOptions`."""
