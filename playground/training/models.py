"""The models that `--model` offers, by name, and what running one depends on.

Importing this does not import torch. A new model is a class in net.py, or in a file of its own, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.errors import UsageError
from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    name: str
    code: Remote
    """Its class: called without arguments, it makes a model of images [batch, 1, 28, 28] → log-probabilities
    [batch, 10]."""
    batch_size: int
    """Default size of a global batch where steps are timed."""
    steps: int
    """Default number of steps to time."""
    bucket_cap_mb: float
    """Default size of a bucket of gradients, in MiB, such that the model has more than one."""
    min_samples_per_rank: int = 1
    """In training, of every batch."""
    min_samples_reason: str = ""
    """Why, if it is more than one."""
    preload: tuple[str, ...] = ()
    """Modules that making one imports, for the fork server to import once for all ranks."""

    def check_batch(self, batch_size: int, size: int) -> None:
        """Raise `UsageError` if a global batch is too small for each of `size` ranks to get the samples it needs."""
        asked = f"--batch-size {batch_size} for {size} ranks"
        if batch_size < size:
            raise UsageError(f"{asked}: it is for all together, so at least one each")
        least = self.min_samples_per_rank * size
        if batch_size < least:
            raise UsageError(f"{asked}: {self.min_samples_reason}, so at least {least}")


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="net",
            code=remote("playground.training.net:Net"),
            batch_size=128,
            steps=100,
            # The usual 25 MB would hold all gradients in one bucket, which cannot leave before the last is ready.
            bucket_cap_mb=0.05,
        ),
        ModelSpec(
            name="resnet18",
            code=remote("playground.training.net:ResNet18"),
            batch_size=32,
            steps=20,
            bucket_cap_mb=25.0,
            min_samples_per_rank=2,
            min_samples_reason="resnet18's BatchNorm needs two samples or more on each",
            preload=("torchvision.models",),
        ),
    )
}
