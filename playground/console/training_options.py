"""Options of commands that train: the data, and what the training depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from playground.console.options import ANY, flags, only_with, options, pack_options
from playground.console.paths import check_place
from playground.console.terminal import Bar
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag
from playground.survival.settings import AUTO, NO, SnapshotSettings
from playground.training import prepare
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.settings import TrainingSettings

MAX_RESTARTS = 1000


@dataclass(frozen=True)
class Interval:
    """Steps between two snapshots or, where `seconds` is not None, seconds."""

    steps: int
    seconds: float | None = None

    def __str__(self) -> str:
        return str(self.steps) if self.seconds is None else f"{self.seconds:g}s"


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
    """Snapshots and restarts of a training run."""

    snapshots: Path | None = flag(
        None, "Take snapshots of the training, in this folder, and go on from the newest.", metavar="DIR"
    )
    snapshot_every: Interval = flag(
        Interval(SnapshotSettings.every),
        "Steps, or seconds (as in 30s), between two snapshots.",
        metavar="STEPS|SECONDS",
        click={"type": StepsOrSeconds()},
    )
    keep: int = flag(SnapshotSettings.keep, "Number of snapshots kept.", least=1, metavar="K")
    resume: str = flag(
        SnapshotSettings.resume,
        "auto: from the newest snapshot in the folder, if there is one; no: from the start, in a folder that has "
        "none; or from the snapshot at PATH.",
        metavar=f"{AUTO}|{NO}|PATH",
    )
    restarts: int = flag(0, "How often to restart all ranks after a failure.", least=0, most=MAX_RESTARTS, metavar="K")
    grace: float = flag(
        30.0,
        "Time for a last snapshot after SIGTERM or SIGUSR1, in seconds; then, exit code 75.",
        above=0,
        most=1e6,
        metavar="SECONDS",
    )

    @property
    def settings(self) -> SnapshotSettings | None:
        """As a training run takes them."""
        if self.snapshots is None:
            return None
        folder, steps, seconds = self.snapshots.absolute(), self.snapshot_every.steps, self.snapshot_every.seconds
        return SnapshotSettings(folder=folder, every=steps, seconds=seconds, keep=self.keep, resume=self.resume)

    @property
    def grace_of_ranks(self) -> float | None:
        """Seconds they have when they are asked to end; None where they could store nothing."""
        return None if self.snapshots is None else self.grace


snapshot_options = pack_options(
    "survival", SnapshotOptions, only_with("snapshot_every", "keep", "resume", "grace", snapshots=ANY)
)
"""Gives a command the argument `survival`: its `SnapshotOptions`."""


def read_mirror(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    """The address, unless nothing can be fetched from such a one."""
    if address is not None:
        prepare.check_mirror(address)
        if prepare.folder_of(address):
            check_place(address.removeprefix("file:"))
    return address


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
    mirror: str | None = flag(
        None,
        "Folder or address (file://, http://, https://) with MNIST's four .gz files.",
        metavar="URL",
        click={"envvar": "PLAYGROUND_MNIST_MIRROR", "callback": read_mirror},
    )
    limit: int | None = flag(None, "Train on the first N samples only.", least=1, metavar="N")

    @property
    def folder(self) -> Path:
        """Where the data is or will be put. Raises `NoData` if that is not given and the user has no home."""
        return self.data_dir or prepare.default_data_dir()


data_options = pack_options("data", DataOptions, only_with("mirror", dataset=("auto", "mnist")))
"""Gives a command the argument `data`: its `DataOptions`."""


training_options = flags(TrainingSettings)
"""Gives a command the arguments that are fields of `TrainingSettings`, beside the data and the synchronisation."""


sync_options = options(
    flags(TrainingSettings, group="sync"),
    *(
        only_with(needed, sync=tuple(name for name, spec in GRAD_SYNCS.items() if needed in spec.needs))
        for needed in ("bucket_cap", "sync_every")
    ),
)


def logical_ranks_option(**more: Any) -> Any:
    """The option, with `more` for click."""
    return flags(
        TrainingSettings, "logical_ranks", changes={"logical_ranks": {"type": click.IntRange(1, 1024), **more}}
    )


Settings = TypeVar("Settings", bound=TrainingSettings)


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
    source = prepare.prepare(asked.dataset, asked.folder, asked.mirror, bar.announce)
    train, test = prepare.samples(source, "train"), prepare.samples(source, "t10k")
    if asked.limit and asked.limit > train:
        raise UsageError(f"--limit {asked.limit}: {source.name} has {train} samples to train on")
    counts = asked.limit, asked.limit or train, test
    return PreparedData(source.folder, source.name, *counts, source.why)
