"""What the ladder depends on, and what stands on it. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.algorithms import ALL_REDUCES, BACKEND
from playground.runtime.errors import UsageError
from playground.training.grad_syncs import RUNGS
from playground.training.models import MODELS

DDP = "ddp"
CANDIDATES = {
    **{name: spec.summary for name, spec in RUNGS.items()},
    DDP: "DistributedDataParallel, which does that in C++",
}
"""What is measured, by name, with what each changes: the rungs in order, then DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class LadderSettings:
    """Raises `UsageError` for what cannot be measured."""

    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """What they are: mnist or digits."""
    limit: int | None = None
    """Train on the first so many samples; None for all."""
    model: str = "net"
    """A name of `MODELS`."""
    steps: int = 100
    """How many are timed, of each candidate."""
    batch_size: int = 128
    """Of all ranks together."""
    lr: float = 0.01
    momentum: float = 0.5
    seed: int = 1234
    all_reduce: str = BACKEND
    """What adds gradients up in the rungs, a name of `ALL_REDUCES`: DistributedDataParallel has the backend's."""
    bucket_cap: int = 52_428
    """Bytes after which a bucket of gradients is full, in the rungs and in DistributedDataParallel."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("model", self.model, tuple(MODELS)),
            ("all_reduce", self.all_reduce, ALL_REDUCES),
        ):
            if value not in choices:
                raise UsageError(f"{name} {value!r} is unknown: choose one of {', '.join(choices)}")
        for name in ("steps", "batch_size", "bucket_cap"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: it must be at least 1")
        for name in ("lr", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} {getattr(self, name)}: it must be a finite number, 0 or above")

    def check_batch(self, size: int) -> None:
        """Raise `UsageError` if the model cannot be trained on a batch that `size` ranks share."""
        MODELS[self.model].check_batch(self.batch_size, size)

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(f"--batch-size {self.batch_size}: there are {samples} samples to train on, choose no more")

    def on_all_ranks(self) -> dict[str, object]:
        """What must be the same on every rank: everything but the folder, which is each host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}
