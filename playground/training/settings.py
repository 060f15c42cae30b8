"""What a training run depends on: one object from the command line to the ranks. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.algorithms import ALL_REDUCES
from playground.runtime.checks import check_at_least_one, check_choice, check_not_negative
from playground.runtime.errors import UsageError
from playground.survival.settings import SnapshotSettings
from playground.training.grad_syncs import NET_SYNCS
from playground.training.models import MODELS

BUCKET_CAP = 25 * 2**20
"""Bytes after which a bucket of gradients is full; DistributedDataParallel's default too."""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
"""The largest number that a parameter, and what is added to it, can be."""
LOADERS = ("batch", "per-sample", "paths")
"""Ways to fetch samples: whole batches; as tutorials do, one by one; and each from a file of its own."""
MAX_LOADER_WORKERS = 64
BEYOND_TUTORIAL = ("sync", "all_reduce", "accumulate", "logical_ranks", "snapshots")
"""Settings that the tutorial's loop knows nothing of."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Raises `UsageError` for what cannot be trained with."""

    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """What they are: mnist or digits."""
    limit: int | None = None
    """Train on the first so many samples; None for all."""
    epochs: int = 10
    batch_size: int = 128
    """Of all ranks together."""
    lr: float = 0.01
    momentum: float = 0.5
    seed: int = 1234
    loader: str = "batch"
    """How samples are fetched: one of `LOADERS`."""
    loader_workers: int = 0
    """Processes of each rank that fetch its batches; with 0 it does that itself."""
    accumulate: int = 1
    """Batches whose gradients are added up before they are averaged, for one step of the optimizer."""
    sync: str = "per-parameter"
    """How replicas are kept equal: a name of `NET_SYNCS`."""
    sync_every: int = 1
    """After how many steps parameters are averaged, where it is parameters (local SGD)."""
    all_reduce: str = "backend"
    """What adds gradients up: a name of `ALL_REDUCES`."""
    bucket_cap: int = BUCKET_CAP
    """Bytes after which a bucket of gradients is full."""
    logical_ranks: int | None = None
    """Fixed shards of the data, with which no bit depends on the number of ranks; None for as many as there are ranks,
    added up as `sync` says."""
    snapshots: SnapshotSettings | None = None
    """When snapshots are taken; None for never."""

    def __post_init__(self) -> None:
        check_choice("loader", self.loader, LOADERS)
        check_choice("sync", self.sync, NET_SYNCS)
        check_choice("all_reduce", self.all_reduce, ALL_REDUCES)
        check_at_least_one(self, "epochs", "batch_size", "accumulate", "sync_every", "bucket_cap")
        if self.logical_ranks is not None:
            check_at_least_one(self, "logical_ranks")
            self.check_beside_logical_ranks()
        check_not_negative(self, "lr", "momentum")
        if not 0 <= self.loader_workers <= MAX_LOADER_WORKERS:
            raise UsageError(f"loader_workers {self.loader_workers}: it must be between 0 and {MAX_LOADER_WORKERS}")
        if self.lr > FLOAT32_MAX:
            raise UsageError(f"lr {self.lr:g}: no float32 is larger than {FLOAT32_MAX:.2g}, and parameters are float32")
        if self.sync_every > 1 and "sync_every" not in NET_SYNCS[self.sync].needs:
            raise UsageError(
                f"--sync-every {self.sync_every} is for parameters: with --sync {self.sync} gradients are averaged at "
                f"every step"
            )

    def check_beside_logical_ranks(self) -> None:
        """Raise `UsageError` for settings that logical ranks take the place of."""
        plain = TrainingSettings(folder=self.folder)
        for name in ("sync", "all_reduce", "accumulate"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} does not go with --logical-ranks, which adds "
                    f"the gradients of a step in an order of its own: leave one of them out"
                )

    def check_for_ddp(self) -> None:
        """Raise `UsageError` for what DistributedDataParallel cannot do."""
        if self.logical_ranks is not None:
            raise UsageError(
                f"--logical-ranks {self.logical_ranks} does not go with DistributedDataParallel: the order in which "
                f"it adds gradients depends on the number of ranks; take sgd"
            )

    def shards_per_rank(self, size: int) -> int:
        """How many shards of the data each of `size` ranks carries: one, if there are no logical ranks.

        Raises `UsageError` if logical ranks cannot be shared out evenly.
        """
        shards, rest = divmod(self.logical_ranks or size, size)
        if rest and self.logical_ranks:
            raise UsageError(
                f"--logical-ranks {self.logical_ranks} for {size} ranks: each carries as many, so the number of ranks "
                f"must be one of {divisors_of(self.logical_ranks)}"
            )
        return shards

    @property
    def is_tutorial(self) -> bool:
        """Whether the tutorial's loop will do: `average_gradients` after each backward, on the backend's all_reduce."""
        plain = TrainingSettings(folder=self.folder)
        return all(getattr(self, name) == getattr(plain, name) for name in BEYOND_TUTORIAL)

    def check_batch(self, size: int) -> None:
        """Raise `UsageError` if `Net` cannot be trained on a batch that `size` ranks share."""
        MODELS["net"].check_batch(self.batch_size, size * self.shards_per_rank(size))

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(f"--batch-size {self.batch_size}: there are {samples} samples to train on, choose no more")

    def check_accumulation(self, samples: int) -> None:
        """Raise `UsageError` if of `samples` some batches would be left over, whose gradients no step takes."""
        batches = math.ceil(samples / self.batch_size)
        if batches % self.accumulate:
            raise UsageError(
                f"--accumulate {self.accumulate} does not divide the {batches} batches of an epoch: choose one of "
                f"{divisors_of(batches)}, or another --batch-size or --limit"
            )

    def on_all_ranks(self) -> dict[str, object]:
        """What must be the same on every rank: everything but the folder, which is each host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def divisors_of(number: int) -> str:
    """All of them, as text."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
