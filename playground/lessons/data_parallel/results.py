"""What the parts of the lesson come to. Plain data: reading it does not import torch.

`document` is a result's shape in JSON, where its keys are no names of fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.training.results import TrainingResult

LABELS = ("parameters", "gradients", "optimizer state", "activations", "gathered outputs", "inputs", "other")
"""Kinds of what a device holds; "other" on GPUs only, where the allocator knows of more than tensors."""


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
class DeviceLoad:
    """What a step takes of one device."""

    device: str
    peak: int
    """The most bytes it holds at any moment."""
    at_peak: dict[str, int]
    """What these bytes are, by label."""
    share: float
    """Of the step, in which it computes: 0 to 1."""


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
    devices: list[DeviceLoad]
    seconds: float
    """Of a step, median."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch with which no device holds more than the cap, by one way to the loss."""

    gather: str
    output_device: str
    devices: int
    batch: int
    fullest: str
    """The device that holds most."""
    at_peak: dict[str, int]
    """What it holds then, by label."""


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
class ModelCopy:
    """How often a device holds the model while replicas run."""

    device: str
    parameters: int
    """Bytes of parameters that it holds."""
    shared: int
    """Parameters of its replica that are the model's own memory."""
    of: int
    """Parameters there are."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStep:
    """A training step of DataParallel, beside the same step on one device."""

    step: int
    loss: float
    replicas_differ: float
    """Largest difference of a replica's parameters from the first replica's, in forward."""
    gradients_differ: float
    """Largest difference of the gradients that a replica contributes from those of the first."""
    from_one_device: float
    """Largest difference between the model's parameters and those of training on one device, after the step."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Two sentences about DataParallel, put to the test."""

    copies: list[ModelCopy]
    steps: list[ReplicaStep]


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
