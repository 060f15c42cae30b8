"""What the parts of the lesson came to. Plain data: reading it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from playground.lessons.bert.settings import LOSSES_TO_COMPARE
from playground.runtime.errors import PlaygroundError

EXACT = 1e-12
"""How far losses in float64 may be apart: that much is rounding."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training has come."""

    way: str
    step: int
    loss: float
    """The mean over the last `LOSSES_TO_COMPARE` steps, or as many as there were."""
    samples_per_second: float
    """Since the report before."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training by one way, all workers together."""

    way: str
    workers: int
    losses: list[float]
    """Of every step, before it: the mean over the global batch."""
    test_accuracy: float
    tested: int
    """Test pairs, each counted once."""
    seconds: float
    """For training alone."""
    samples_per_second: float
    replicas_max_difference: float
    """The largest difference of any parameter or buffer between a rank and rank 0; of one process, 0."""

    @property
    def last_loss(self) -> float:
        """The mean over the last steps."""
        return fmean(self.losses[-LOSSES_TO_COMPARE:])

    @property
    def diverged(self) -> bool:
        return not all(map(math.isfinite, self.losses))


@dataclass(frozen=True, kw_only=True)
class Equality:
    """The losses of one way in float64, without dropout, beside those of one device."""

    way: str
    workers: int
    steps: int
    first: float
    last: float
    difference: float
    """The largest, of any step."""


def compare_losses(alone: Training, others: Sequence[Training]) -> list[Equality]:
    """How far each training is from `alone`. Raises `PlaygroundError` if it is by more than rounding."""
    result = []
    for other in others:
        difference = max(abs(one - two) for one, two in zip(alone.losses, other.losses, strict=True))
        if not difference <= EXACT:
            raise PlaygroundError(
                f"{other.way} on {other.workers} workers: its losses are up to {difference:.2g} from those of one "
                f"device, where rounding makes less than {EXACT:g}"
            )
        result.append(
            Equality(
                way=other.way, workers=other.workers, steps=len(other.losses), first=other.losses[0],
                last=other.losses[-1], difference=difference,
            )
        )  # fmt: skip
    return result


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a step takes by one way on so many workers."""

    way: str
    workers: int
    seconds: float
    """Per step, median."""
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class Use:
    """A device, or the device of a rank."""

    device: str
    computing: float
    """The share of a step in which it computes, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a device, or the device of a rank, holds in a step."""

    device: str
    peak: int
    """The most bytes at any moment."""
    held: dict[str, int]
    """What they were then, by label."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch by one way such that no device holds more than the cap."""

    way: str
    workers: int
    batch_size: int
    """On all workers together."""
    fullest: str
    """The device that holds most then."""
    peak: int
    """Bytes it holds."""


@dataclass(frozen=True, kw_only=True)
class PartReady:
    """When backward had the gradients of one part of the model, and how large they are."""

    part: str
    bytes: int
    ready: float
    """The share of backward after which the last of them was ready, 0 to 1, median."""
    rows_used: int | None
    """Of the word embeddings: how many rows the ranks' batches of a step use."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What averaging gradients costs in a step. Seconds are medians, as the ladder takes them."""

    way: str
    seconds: float
    """Of the step."""
    exposed: float
    """From the last gradient to the last average."""
    alone: float
    """The same averaging with no backward to hide behind."""
    hidden: float
    """The share of that which is not exposed, 0 to 1."""
    messages: int
    bytes: int
    """Per step and rank."""
    early_bytes: int
    """Of those, what leaves before the last gradient is ready: nothing else can be hidden."""
    difference_to_ddp: float
    """The largest difference of any parameter to DDP's, after all steps."""
    caveat: str = ""
    """Why `hidden` is less than it could be, where the backend keeps DDP from hiding messages."""
