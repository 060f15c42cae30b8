"""What the proof depends on: one object from the command line to the ranks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.checks import check_at_least_one
from playground.runtime.errors import UsageError
from playground.training.settings import TrainingSettings

BUCKET_CAP_MB = 0.01
"""So small that `Net` has several buckets, whose gradients are then added up in another order than without buckets."""
RECIPE = ("seed", "batch_size", "lr", "momentum", "all_reduce", "limit", "bucket_cap")
"""The fields that the figures depend on, beside the data and the number of steps."""


@dataclass(frozen=True, kw_only=True)
class ProveSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` and `sync_every` matter to the failure modes
    only: the proof tries every gradient synchronisation, at every step.

    Raises `UsageError` for what nothing can be proved with.
    """

    steps: int = 10
    """After each of them, everything is compared."""
    batch_size: int = 64
    """Of all ranks together."""
    bucket_cap: int = int(BUCKET_CAP_MB * 2**20)
    """Bytes after which a bucket of gradients is full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "steps")
        if self.lr == 0:
            raise UsageError("lr 0: no step would change anything, so it must be above 0")

    @property
    def recipe(self) -> dict[str, object]:
        """The fields in `RECIPE`, as JSON shows them."""
        return {name: getattr(self, name) for name in RECIPE}
