"""Options of commands that train: the data, and what the training depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from playground.algorithms import ALL_REDUCES
from playground.console.dependent_options import ANY, only_with
from playground.console.options import Finite, options, pack_options
from playground.console.paths import FilePath, check_place
from playground.console.progress import Bar
from playground.runtime.errors import UsageError
from playground.survival.settings import AUTO, NO, SnapshotSettings
from playground.training import prepare
from playground.training.grad_syncs import NET_SYNCS
from playground.training.image_files import prepare_image_files
from playground.training.settings import LOADERS, MAX_LOADER_WORKERS, TrainingSettings

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


MAX_LOGICAL_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data to train on, and where it lies or is to be had."""

    dataset: str
    data_dir: Path | None
    mirror: str | None
    limit: int | None

    @property
    def folder(self) -> Path:
        """Where the data lies or is to be put. Raises `NoData` if nobody says where and the user has no home."""
        return self.data_dir or prepare.default_data_dir()


def read_mirror(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    """The address, unless nothing can be fetched from such a one."""
    if address is not None:
        prepare.check_mirror(address)
        if prepare.folder_of(address):
            check_place(address.removeprefix("file:"))
    return address


data_options = pack_options(
    "data", DataOptions,
    click.option(
        "--dataset", type=click.Choice(prepare.DATASETS), default="auto", show_default=True,
        help="auto: MNIST if it is here or can be downloaded, else generated digits.",
    ),
    click.option(
        "--data-dir", type=FilePath(), envvar="PLAYGROUND_DATA_DIR", show_default="~/.cache/playground",
        help="Directory of the data; what is missing is put there.",
    ),
    click.option(
        "--mirror", envvar="PLAYGROUND_MNIST_MIRROR", metavar="URL", callback=read_mirror,
        help="Folder or address (file://, http://, https://) with MNIST's four .gz files.",
    ),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Train on the first N samples only."),
    only_with("mirror", dataset=("auto", "mnist")),
)  # fmt: skip
"""Gives a command the argument `data`: its `DataOptions`."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What a training run depends on, beside the data and the synchronisation: fields of `TrainingSettings`."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    accumulate: int
    loader: str
    loader_workers: int


training_options = pack_options(
    "training", TrainingOptions,
    click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes over the data."),
    click.option(
        "--batch-size", type=click.IntRange(1), default=128, show_default=True,
        help="Global batch size: samples per step, over all ranks.",
    ),
    click.option("--lr", type=Finite(0), default=0.01, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True, help="Momentum of SGD."),
    click.option(
        "--accumulate", type=click.IntRange(1), default=1, show_default=True, metavar="K",
        help="Accumulate the gradients of K batches for each step.",
    ),
    click.option(
        "--loader", type=click.Choice(LOADERS), default=LOADERS[0], show_default=True,
        help="Load whole batches at once; as tutorials do, sample by sample; or each from its path, a PNG file.",
    ),
    click.option(
        "--loader-workers", type=click.IntRange(0, MAX_LOADER_WORKERS), default=0, show_default=True, metavar="N",
        help="Processes of each rank that load its batches ahead; with 0 the rank loads them itself.",
    ),
)  # fmt: skip
"""Gives a command the argument `training`: its `TrainingOptions`."""
all_reduce_option = click.option(
    "--all-reduce", type=click.Choice(ALL_REDUCES), metavar="NAME", default=ALL_REDUCES[0], show_default=True,
    help=f"All-reduce that adds the gradients, the backend's or one of ours: {', '.join(ALL_REDUCES)}.",
)  # fmt: skip


def bucket_cap_option(megabytes: float | None, shown: str | bool = True) -> Any:
    """The option, with a default in megabytes."""
    return click.option(
        "--bucket-cap-mb", type=Finite(0, 1e6, min_open=True), default=megabytes, show_default=shown, metavar="MB",
        help="Capacity of a bucket of gradients.",
    )  # fmt: skip


def syncs_with(setting: str) -> tuple[str, ...]:
    """The names of the gradient synchronisations that take this setting."""
    return tuple(name for name, spec in NET_SYNCS.items() if setting in spec.needs)


sync_options = options(
    click.option(
        "--sync", type=click.Choice(tuple(NET_SYNCS)), metavar="NAME", default="per-parameter", show_default=True,
        help=f"How gradients are averaged: {', '.join(NET_SYNCS)}. With parameters each rank takes its own steps, and "
        "parameters are averaged: local SGD.",
    ),
    click.option(
        "--sync-every", type=click.IntRange(1), default=1, show_default=True, metavar="STEPS",
        help="With --sync parameters: number of steps between two averages.",
    ),
    all_reduce_option,
    bucket_cap_option(25.0),
    only_with("bucket_cap_mb", sync=syncs_with("bucket_cap")),
    only_with("sync_every", sync=syncs_with("sync_every")),
)  # fmt: skip


def logical_ranks_option(**more: Any) -> Any:
    """The option, with `more` for click."""
    return click.option(
        "--logical-ranks", type=click.IntRange(1, MAX_LOGICAL_RANKS), metavar="V",
        help="Cut the data into V shards and carry V / N of them on each rank: every bit is the same for any N that "
        "divides V, also if N changes after a restart. One thread per rank.",
        **more,
    )  # fmt: skip


Settings = TypeVar("Settings", bound=TrainingSettings)


@dataclass(frozen=True, kw_only=True)
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
    """How it came here, or why it is not the one wished for."""

    def __str__(self) -> str:
        return f"{self.name} ({self.train:,} + {self.test:,} images; {self.why})"

    def settings(self, asked: Settings) -> Settings:
        """What was asked for, on this data."""
        return replace(asked, folder=self.folder, dataset=self.name, limit=self.limit)

    @property
    def summary(self) -> dict[str, object]:
        """As JSON shows it."""
        return {"name": self.name, "train": self.train, "test": self.test, "why": self.why}


def describe_logical_ranks(settings: TrainingSettings, size: int) -> list[str]:
    """A line about them for the head of a run on `size` ranks; none if there are none."""
    if settings.logical_ranks is None:
        return []
    shards = settings.shards_per_rank(size)
    return [f"logical ranks: {settings.logical_ranks}, {shards} on each rank, which computes on one thread"]


def prepare_data(asked: DataOptions, bar: Bar, *, as_files: bool = False) -> PreparedData:
    """Get the data onto this host, with `as_files` each training image as a file of its own, too; what takes long is
    shown by `bar`. Raises `NoData`, and `UsageError` for a limit beyond the data."""
    source = prepare.prepare(asked.dataset, asked.folder, asked.mirror, bar.announce)
    train, test = prepare.samples(source, "train"), prepare.samples(source, "t10k")
    if asked.limit and asked.limit > train:
        raise UsageError(f"--limit {asked.limit}: {source.name} has {train} samples to train on")
    if as_files:
        prepare_image_files(source.folder, asked.limit, bar.announce)
    return PreparedData(
        folder=source.folder, name=source.name, limit=asked.limit, train=asked.limit or train, test=test,
        why=source.why,
    )  # fmt: skip


def bytes_of(megabytes: float) -> int:
    """DistributedDataParallel's bucket_cap_mb counts 2^20 bytes as a megabyte, and so does ours."""
    return max(1, int(megabytes * 2**20))
