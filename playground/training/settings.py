"""What a training run depends on, and what of it decides how replicas stay one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from playground.training.gradients import ALL_REDUCES, BUCKET_CAP
from playground.training.rungs import RUNGS
from playground.training.sync import AverageParameters, Sync


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training run depends on."""

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
    """How samples are fetched: a key of `data.LOADERS`."""
    accumulate: int = 1
    """Batches whose gradients are added up before they are averaged, for one step of the optimizer."""
    sync: str = "flat"
    """How sgd keeps its replicas one: a key of `rungs.RUNGS`, or "parameters"."""
    every: int = 1
    """After how many steps parameters are averaged, if they are."""
    all_reduce: str = "backend"
    """What sgd adds gradients up with: a key of `gradients.ALL_REDUCES`."""
    bucket_cap: int = BUCKET_CAP
    """Bytes after which a bucket of gradients is full."""


def synchronised(model: nn.Module, settings: Settings) -> Sync:
    """What keeps the replicas of `model` one in the way that `settings` ask for."""
    all_reduce = ALL_REDUCES[settings.all_reduce]
    if settings.sync == "parameters":
        return AverageParameters(model, all_reduce, settings.every)
    return RUNGS[settings.sync](model, all_reduce, settings.bucket_cap)
