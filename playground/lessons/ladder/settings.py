"""What the ladder depends on, and what stands on it. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.checks import check_at_least_one, check_choice
from playground.training.grad_syncs import grad_syncs_for
from playground.training.models import MODELS
from playground.training.settings import TrainingSettings

DDP = "ddp"
DDP_SUMMARY = "DistributedDataParallel, which does what overlapped does in C++"


def candidates(model: str) -> dict[str, str]:
    """What is measured with this model, by name, with what each changes: every gradient synchronisation that makes a
    difference to it, in order, then DistributedDataParallel."""
    specs = grad_syncs_for(has_embeddings=MODELS[model].reads_tokens)
    return {**{name: spec.summary for name, spec in specs.items()}, DDP: DDP_SUMMARY}


@dataclass(frozen=True, kw_only=True)
class LadderSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` does not matter: every rung is measured.

    Raises `UsageError` for what cannot be measured.
    """

    model: str = "net"
    """A name of `MODELS`."""
    steps: int = 100
    """How many are timed, of each candidate."""
    bucket_cap: int = 52_428
    """Bytes after which a bucket of gradients is full, in the rungs and in DistributedDataParallel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model", self.model, MODELS)
        check_at_least_one(self, "steps")

    def check_batch(self, size: int) -> None:
        """Raise `UsageError` if the model cannot be trained on a batch that `size` ranks share."""
        MODELS[self.model].check_batch(self.batch_size, size)
