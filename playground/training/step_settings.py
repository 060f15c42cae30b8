"""The settings of a measurement of training steps: what is trained, on what, with which gradient
synchronisations. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from playground.algorithms import ALL_REDUCES
from playground.base.errors import UsageError
from playground.base.flags import check_flags, flag, like
from playground.base.remote import remote
from playground.training.grad_syncs import DDP, GRAD_SYNCS, SPARSE
from playground.training.prepare import PreparedData

BERT = "bert"
IMAGE_MODELS = {
    "net": remote("playground.lessons.mnist:Net"),
    "resnet18": remote("playground.training.resnet:ResNet18"),
}
"""They have 21,840 and 11,175,370 parameters."""
MODELS = IMAGE_MODELS | {BERT: remote("playground.training.sparse_embeddings:TokenBert")}
"""The models to train; the last, of 13,307,907 parameters, on token ids drawn by Zipf's law, in
place of images."""
TOKENS = PreparedData(
    name="zipf", folder=Path(), why="as frequent as words are in a text", train=4096, test=0,
    kind="sequences of token ids",
)  # fmt: skip
"""Token ids, which each rank draws for itself."""
OF_BERT = {"steps": 10, "batch_size": 16, "bucket_cap": 2 * 2**20}
"""Defaults for bert, which differ from those of `StepSettings`."""


ON_NO_LINK = ("shared-step", "zero-1", "zero-2", "zero-3")
"""Rungs without an all-reduce, whose messages a simulated link does not delay."""


def candidates(model: str, link: float = 0.0) -> dict[str, str]:
    """The candidates for this model by name, with a summary: every gradient synchronisation, in
    order, with one for embeddings where there are any, then DistributedDataParallel. Over a
    simulated link without those that it would not delay."""
    variants: dict[str, str] = {}
    for name, spec in GRAD_SYNCS.items():
        if not (link and name in ON_NO_LINK):
            variants[name] = spec.summary
        if name == "overlapped" and model == BERT:
            variants[SPARSE] = (
                "overlapped, and of an embedding's gradient only the rows that some rank used"
            )
    return variants | {DDP: "DistributedDataParallel, which does what overlapped does in C++"}


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a measurement. Raises `UsageError` for what cannot be measured."""

    model: str = flag("net", "Model to train.", choices=MODELS)
    steps: int = flag(100, "Number of steps to time on each variant.", least=1)
    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """Name of the data: mnist or digits."""
    batch_size: int = flag(128, "Global batch size: samples per step, over all ranks.", least=1)
    lr: float = flag(0.01, "Learning rate.", least=0)
    momentum: float = flag(0.5, "Momentum of SGD.", least=0)
    seed: int = 1234
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
        52_428,
        "Capacity of a bucket of gradients.",
        least=1,
        name="--bucket-cap-mb",
        in_megabytes=True,
        metavar="MB",
    )
    """Bytes after which a bucket of gradients is full, in the variants and in
    DistributedDataParallel."""

    def __post_init__(self) -> None:
        check_flags(self)

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

    def on_all_ranks(self) -> dict[str, object]:
        """The settings that must be the same on every rank: all but the folder, which is each
        host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


@dataclass(frozen=True, kw_only=True)
class ByModel:
    """Settings whose defaults depend on the model."""

    steps: int | None = like(StepSettings, "steps", None, shown_default="100, for bert 10")
    batch_size: int | None = like(
        StepSettings, "batch_size", None, shown_default="128, for bert 16"
    )
    bucket_cap: int | None = like(
        StepSettings, "bucket_cap", None, shown_default="0.05, for bert 2"
    )
