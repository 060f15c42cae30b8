"""What the parts of the lesson come to. Plain data: reading it does not import torch.

`document` is a result's shape in JSON, where its keys are no names of fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.training.results import TrainingResult


@dataclass(frozen=True, kw_only=True)
class DeviceShares:
    """How many samples of several batches one device gets."""

    device: str
    samples: dict[str, int]
    """By batch and number of devices, as in "30 on 2"."""

    @property
    def document(self) -> dict[str, object]:
        return {"device": self.device, **self.samples}


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a part of a training step copied to a device from one other."""

    part: str
    source: str
    """A device, or "host"."""
    bytes: int

    @property
    def document(self) -> dict[str, object]:
        return {"part": self.part, "from": self.source, "bytes": self.bytes}


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A training step as one device sees it."""

    device: str
    held: dict[str, int]
    """Bytes in its memory after each part of the step; "(before)" comes first."""
    received: list[Received]

    @property
    def document(self) -> dict[str, object]:
        return {"device": self.device, "held": self.held, "received": [each.document for each in self.received]}


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    device: str
    peak: int
    """The most bytes it held at any moment of a step."""


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """What a step costs by one way to the loss."""

    gather: str
    """What is gathered: a name of `WAYS`."""
    output_device: str
    loss: float
    """Before the step."""
    gathered: int
    """Bytes that gather copied from other devices."""
    devices: list[DevicePeak]
    seconds: float
    """Of a step, median."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """The mean loss of a batch, taken in three ways."""

    samples: int
    chunks: list[int]
    """Samples on each device."""
    means: list[float]
    """The mean over each chunk."""
    mean: float
    """The mean over all samples, as one device would take it."""
    mean_of_means: float
    weighted_mean: float
    """The means, weighted by the sizes of their chunks."""

    @property
    def document(self) -> dict[str, object]:
        return {
            "samples": self.samples, "chunks": self.chunks, "means": self.means, "mean": self.mean,
            "mean of means": self.mean_of_means, "weighted mean": self.weighted_mean,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceTraffic:
    """Bytes of model and gradients that a device sends and receives in a step."""

    device: str
    sent: int
    received: int


@dataclass(frozen=True, kw_only=True)
class Copying:
    """What a step of DataParallel costs."""

    seconds: float
    """Of a step, median."""
    devices: list[DeviceTraffic]

    @property
    def busiest(self) -> DeviceTraffic:
        return max(self.devices, key=lambda device: device.sent + device.received)

    @property
    def sent(self) -> int:
        """Bytes, by all devices together."""
        return sum(device.sent for device in self.devices)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What the same step costs one rank where each has its own replica, and gradients are averaged."""

    seconds: float
    """Of a step, median."""
    sent: int
    """Bytes this rank sends in a step, with our ring."""


@dataclass(frozen=True, kw_only=True)
class WorkSeconds:
    """How long the same piece of work takes one worker, a thread or a process, and several of them at once."""

    alone: float
    """Seconds, median; 0 on a rank that waited meanwhile."""
    together: float
    """Seconds until every worker has done its piece, median."""


def speedup(alone: float, together: float, workers: int) -> float:
    """How many times as much `workers` get done in the same time as one of them."""
    return workers * alone / together


@dataclass(frozen=True, kw_only=True)
class TrainingComparison:
    """The same training on all devices, and on the first alone."""

    together: TrainingResult
    alone: TrainingResult

    @property
    def loss_difference(self) -> float:
        """Of the last epoch. Float32 rounds sums of other parts otherwise, and training enlarges it."""
        return abs(self.together.epochs[-1].loss - self.alone.epochs[-1].loss)


def to_documents(
    results: Sequence[DeviceShares] | Sequence[DeviceStep] | Sequence[Means],
) -> list[dict[str, object]]:
    return [result.document for result in results]
