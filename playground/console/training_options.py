"""Options of commands that train: the data, and what the training depends on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from playground.console.options import flags, pack_options
from playground.console.terminal import Bar
from playground.runtime.errors import UsageError
from playground.runtime.flags import ANY, flag
from playground.survival.settings import AUTO, NO, SnapshotSettings
from playground.training import prepare
from playground.training.settings import TrainingSettings

MAX_RESTARTS = 1000


GRACE = 30.0
"""Seconds for a last snapshot after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """Snapshots and restarts of a training run."""

    snapshots: Path | None = flag(
        None, "Take snapshots of the training, in this folder, and resume from the newest.", metavar="DIR"
    )
    snapshot_every: int = flag(
        SnapshotSettings.every, "Steps between two snapshots.", least=1, metavar="STEPS", needs={"snapshots": ANY}
    )
    resume: str = flag(
        SnapshotSettings.resume,
        "auto: from the newest snapshot in the folder, if there is one; no: from the start, in a folder that has "
        "none; or from the snapshot at PATH.",
        metavar=f"{AUTO}|{NO}|PATH",
        needs={"snapshots": ANY},
    )
    restarts: int = flag(0, "How often to restart all ranks after a failure.", least=0, most=MAX_RESTARTS, metavar="K")

    @property
    def settings(self) -> SnapshotSettings | None:
        """As a training run takes them."""
        if self.snapshots is None:
            return None
        return SnapshotSettings(folder=self.snapshots.absolute(), every=self.snapshot_every, resume=self.resume)

    @property
    def grace_of_ranks(self) -> float | None:
        """Seconds they have when they are asked to end; None where they could store nothing."""
        return None if self.snapshots is None else GRACE


snapshot_options = pack_options("survival", SnapshotOptions)
"""Gives a command the argument `survival`: its `SnapshotOptions`."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data to train on, and where it is or can be fetched."""

    dataset: str = flag(
        "auto", "auto: MNIST if it is here or can be downloaded, else generated digits.", choices=prepare.DATASETS
    )
    data_dir: Path | None = flag(
        None,
        "Directory of the data; what is missing is put there.",
        click={"envvar": "PLAYGROUND_DATA_DIR", "show_default": "~/.cache/playground"},
    )
    limit: int | None = flag(None, "Train on the first N samples only.", least=1, metavar="N")

    @property
    def folder(self) -> Path:
        """Where the data is or will be put. Raises `NoData` if that is not given and the user has no home."""
        return self.data_dir or prepare.default_data_dir()


data_options = pack_options("data", DataOptions)
"""Gives a command the argument `data`: its `DataOptions`."""


training_options = flags(TrainingSettings)
"""Gives a command the arguments that are fields of `TrainingSettings`, beside loader, data and synchronisation."""
loader_options = flags(TrainingSettings, group="loader")
sync_options = flags(TrainingSettings, group="sync")


Settings = TypeVar("Settings", bound=Any)


@dataclass(frozen=True)
class PreparedData:
    """The data, ready on this host."""

    folder: Path
    name: str
    """mnist or digits."""
    limit: int | None
    train: int
    """Samples to train on."""
    test: int
    why: str
    """How it was obtained, or why it is not the one asked for."""
    kind: str = "images"

    def __str__(self) -> str:
        counts = " + ".join(f"{samples:,}" for samples in (self.train, self.test) if samples)
        return f"{self.name} ({counts} {self.kind}; {self.why})"

    def settings(self, asked: Settings) -> Settings:
        """The settings `asked` for, on this data."""
        return replace(asked, folder=self.folder, dataset=self.name, limit=self.limit)

    @property
    def summary(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"name": self.name, "train": self.train, "test": self.test, "why": self.why}


def prepare_data(asked: DataOptions, bar: Bar) -> PreparedData:
    """Get the data onto this host; `bar` shows what takes long. Raises `NoData`, and `UsageError` for a limit beyond
    the data."""
    source = prepare.prepare(asked.dataset, asked.folder, os.environ.get(prepare.MIRROR), bar.announce)
    train, test = prepare.samples(source, "train"), prepare.samples(source, "t10k")
    if asked.limit and asked.limit > train:
        raise UsageError(f"--limit {asked.limit}: {source.name} has {train} samples to train on")
    counts = asked.limit, asked.limit or train, test
    return PreparedData(source.folder, source.name, *counts, source.why)
