"""The settings of a training run: one object from the command line to the ranks. Does not import
torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.algorithms import ALL_REDUCES
from playground.checkpoint.folder import SnapshotSettings
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag
from playground.training.grad_syncs import GRAD_SYNCS

BUCKET_CAP = 25 * 2**20
"""Bytes after which a bucket of gradients is full; DistributedDataParallel's default too."""
FLOAT32, BFLOAT16 = DTYPES = "float32", "bfloat16"


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What a training computes in, and what it keeps for backward: options of several commands."""

    dtype: str = flag(
        FLOAT32,
        "Compute in this type. Parameters that the optimizer steps for, and its state, are "
        "float32.",
        choices=DTYPES,
    )
    checkpoint_activations: bool = flag(
        False,
        "Keep the input of each block alone for backward, which computes the rest again.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Raises `UsageError` for what cannot be trained with."""

    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """Name of the data: mnist or digits."""
    limit: int | None = None
    """Number of samples to train on, the first ones; None for all."""
    epochs: int = flag(10, "Passes over the data.", least=1)
    batch_size: int = flag(128, "Global batch size: samples per step, over all ranks.", least=1)
    lr: float = flag(0.01, "Learning rate.", least=0)
    momentum: float = flag(0.5, "Momentum of SGD.", least=0)
    seed: int = 1234
    accumulate: int = flag(
        1, "Accumulate the gradients of K batches for each step.", least=1, metavar="K"
    )
    sync: str = flag(
        "per-parameter",
        f"How gradients are averaged: {', '.join(GRAD_SYNCS)}. With parameters each rank takes its "
        "own steps, and parameters are averaged: local SGD.",
        choices=GRAD_SYNCS,
        metavar="NAME",
    )
    sync_every: int = flag(
        1,
        "With --sync parameters: number of steps between two averages.",
        least=1,
        metavar="STEPS",
    )
    all_reduce: str = flag(
        ALL_REDUCES[0],
        "All-reduce that adds the gradients, the backend's or one of ours: "
        f"{', '.join(ALL_REDUCES)}.",
        choices=ALL_REDUCES,
        metavar="NAME",
    )
    link: float = flag(
        0.0,
        "Simulate a link of GBIT 10^9 bits per second for each rank: no message is faster. 0: "
        "none.",
        least=0,
        metavar="GBIT",
    )
    bucket_cap: int = flag(
        BUCKET_CAP,
        "Capacity of a bucket of gradients.",
        least=1,
        name="--bucket-cap-mb",
        in_megabytes=True,
        metavar="MB",
    )
    """Bytes after which a bucket of gradients is full."""
    snapshots: SnapshotSettings | None = None
    """When snapshots are taken; None for never."""

    def __post_init__(self) -> None:
        check_flags(self)

        spec = GRAD_SYNCS[self.sync]
        if self.snapshots and spec.takes_step:
            raise UsageError(
                f"--sync {self.sync} takes no snapshots: it has the optimizer's state; use another "
                "--sync"
            )
        for name in ("all_reduce", "link"):
            if (
                getattr(self, name) != getattr(TrainingSettings, name)
                and "all_reduce" not in spec.needs
            ):
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise UsageError(
                    f"{option}: --sync {self.sync} has no all-reduce, leave one of them out"
                )

    def check_batch(self, size: int) -> None:
        """Raise `UsageError` if a global batch is too small for each of `size` ranks to get a
        sample."""
        if self.batch_size < size:
            asked = f"--batch-size {self.batch_size} for {size} ranks"
            raise UsageError(f"{asked}: it is for all together, so at least one each")

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(
                f"--batch-size {self.batch_size}: there are {samples} samples to train on, choose "
                "no more"
            )

    def check_accumulation(self, samples: int) -> None:
        """Raise `UsageError` if of `samples` some batches would be left over, whose gradients no
        step takes."""
        batches = math.ceil(samples / self.batch_size)
        if batches % self.accumulate:
            divisors = ", ".join(
                str(divisor) for divisor in range(1, batches + 1) if batches % divisor == 0
            )
            raise UsageError(
                f"--accumulate {self.accumulate} does not divide the {batches} batches of an "
                f"epoch: choose one of {divisors}, or another --batch-size or --limit"
            )

    def on_all_ranks(self) -> dict[str, object]:
        """The settings that must be the same on every rank: all but the folder, which is each
        host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}
