"""The results of a training run. Plain data: reading it does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from playground.algorithms import ALGORITHMS
from playground.runtime.errors import PlaygroundError

ROUNDING = 1e-4
"""How far replicas may drift apart where each adds in an order of its own (three of them, ten
epochs: 1.2e-7)."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The results of an epoch, over all ranks."""

    epoch: int
    loss: float
    """The mean over all samples, with dropout on."""
    loss_per_rank: list[float | None]
    """The same over each rank's own samples; None for a rank that had none."""
    train_accuracy: float
    test_accuracy: float
    tested: int
    """Samples in the test set, each counted once."""
    seconds: float
    """For training alone."""
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    epochs: list[Epoch]
    replicas_max_difference: float
    """The largest difference of any parameter or buffer between a rank and rank 0, at the end."""
    replicas_differ_in: str = ""
    """The name of the parameter or buffer with that difference; empty if there is none."""

    @property
    def best(self) -> Epoch:
        return max(self.epochs, key=lambda epoch: epoch.test_accuracy)

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.epochs[-1].loss)


def replicas_verdict(difference: float, all_reduce: str | None = None, name: str = "") -> str:
    """Describe the largest difference between replicas, which is in the parameter or buffer of this
    `name`. Raises `PlaygroundError` if it must not be there."""
    if difference == 0:
        return "all replicas are bit-identical (largest difference 0.0)"
    if all_reduce in ALGORITHMS and not ALGORITHMS[all_reduce].same_bits and difference < ROUNDING:
        return (
            f"the replicas differ by up to {difference:.1e}: round this ring each rank adds in an "
            "order of its own, and rounding depends on the order"
        )
    where = f", in {name}" if name else ""
    raise PlaygroundError(
        f"the replicas differ by up to {difference:.2g}{where}: they must not at all"
    )
