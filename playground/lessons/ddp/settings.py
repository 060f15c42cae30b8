"""What the lab depends on: one object, from the command line to the ranks. Importing it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from playground.lessons.ddp.hooks_table import BASELINE, HOOKS
from playground.lessons.ddp.parts import PARTS
from playground.runtime.checks import check_at_least_one, check_choice
from playground.runtime.errors import UsageError
from playground.training.models import IMAGE_MODELS
from playground.training.settings import TrainingSettings

MAX_ACCUMULATED = 256
"""Batches: all of them are held in memory, and once more as a single one."""


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """Raises `UsageError` for what no lab can be made of."""

    training: TrainingSettings
    """Data, batch size, learning rate, seed; `accumulate` is the number of batches in the part of that name."""
    parts: tuple[str, ...] = tuple(PARTS)
    """What to run: names of `PARTS`."""
    model: str = "net"
    """What is trained: a name of `IMAGE_MODELS`."""
    caps: tuple[float, ...] = ()
    """Bucket caps in MiB; none for those that go with the model."""
    static_graph: bool = False
    """Whether, in the part buckets, DDP may take every backward to be the same."""
    gradient_as_bucket_view: bool = False
    """Whether, in the part buckets, gradients are views of buckets."""
    hooks: tuple[str, ...] = tuple(HOOKS)
    """What to compare: names of `HOOKS`, that of the baseline first."""
    required: tuple[str, ...] = ()
    """Those of them that must not be refused."""
    steps: int = 5
    """How many to time, or to train with each hook."""

    def __post_init__(self) -> None:
        asked: tuple[tuple[str, tuple[str, ...], Collection[str]], ...] = (
            ("part", self.parts, PARTS),
            ("model", (self.model,), IMAGE_MODELS),
            ("hook", self.hooks, HOOKS),
            ("required hook", self.required, self.hooks),
        )
        for kind, names, known in asked:
            for name in names:
                check_choice(kind, name, known)
        if self.hooks[:1] != (BASELINE,):
            raise UsageError(f"hooks {', '.join(self.hooks)}: {BASELINE} must come first, for comparison")
        for cap in self.caps:
            if not 0 < cap < math.inf:
                raise UsageError(f"bucket cap {cap}: it must be a finite number of MiB above 0")
        check_at_least_one(self, "steps")
        if self.training.accumulate > MAX_ACCUMULATED:
            raise UsageError(f"--accumulate {self.training.accumulate}: the lab adds up {MAX_ACCUMULATED} at most")

    @property
    def bucket_caps(self) -> tuple[float, ...]:
        """MiB after which a bucket is full: all are compared in the part buckets, the last holds for the others."""
        return self.caps or IMAGE_MODELS[self.model].bucket_caps_mb

    def check_batch(self, size: int) -> None:
        """Raise `UsageError` if a batch cannot be shared out among `size` ranks, or one gets too little of it."""
        IMAGE_MODELS[self.model].check_batch(self.training.batch_size, size)

    @property
    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        return {
            "model": self.model, "caps": self.bucket_caps, "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view, "hooks": self.hooks, "required": self.required,
            "steps": self.steps,
        }  # fmt: skip

    def on_all_ranks(self) -> dict[str, object]:
        """What must be the same on every rank: everything but the folder, which is each host's own."""
        return {**self.training.on_all_ranks(), **self.document, "parts": self.parts}
