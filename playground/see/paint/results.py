"""Outcomes of the runs that figures are drawn from. Plain data: reading it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from playground.runtime.rank.rank import Event as Report
from playground.see.analyse import Message, Vector, match_messages
from playground.see.record import Recording


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The outcome of a run."""

    results: list[Any]
    """Return values of its function, by rank."""
    recording: Recording | None = None
    """None where only the results are drawn, and recording would take time."""
    arguments: tuple[Any, ...] = ()
    """Arguments of the function besides rank and size."""
    reports: tuple[tuple[int, Report], ...] = ()
    """Reports of the ranks, each with its rank, in order; empty if the run was recorded."""

    @property
    def recorded(self) -> Recording:
        """The recording of a run that is recorded."""
        assert self.recording
        return self.recording

    @property
    def messages(self) -> tuple[Message, ...]:
        """The recorded messages, in the order in which they were sent."""
        return match_messages(self.recorded).matched


@dataclass(frozen=True)
class Change:
    """The numbers that a rank held before and after, or none."""

    before: Vector
    after: Vector


@dataclass(frozen=True, kw_only=True)
class SgdStep:
    """One step of synchronous SGD on one rank, seen at one weight of the model."""

    weight: float
    """The weight before the step."""
    gradient: float
    """The gradient of this rank's samples."""
    average: float
    """The gradient averaged over all ranks."""
    new_weight: float
    lr: float
    samples: int
    """Number of this rank's samples."""
    parameters: int
    """Number of the model's parameters."""
    replicas_max_difference: float
    """The largest difference of any parameter between a rank and rank 0, after the step."""


@dataclass
class BucketSent:
    """A bucket of gradients that DistributedDataParallel has sent."""

    number: int
    bytes: int
    parameters: tuple[int, ...]
    """Numbers of the parameters whose gradients are in it, in the order of the model."""
    left: float
    """Seconds from the beginning of backward until it was sent."""
    done: float = inf
    """Seconds until its sum was there."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One backward of DistributedDataParallel."""

    names: tuple[str, ...]
    """Names of the parameters, in the order of the model."""
    ready: tuple[tuple[int, float], ...]
    """Parameters in the order in which their gradients got ready, and seconds from the beginning of backward."""
    sent: tuple[BucketSent, ...]
    """The buckets, in the order in which they left."""
    seconds: float
    """Duration of backward, at the end of which every gradient is averaged."""


@dataclass(frozen=True)
class DataParallelStep:
    """A step of DataParallel by one way to the loss."""

    gather: str
    """The tensors that are gathered: a name of `playground.lessons.data_parallel.page.WAYS`."""
    batch: tuple[int, ...]
    """The shape of the batch that is scattered."""
    chunks: list[tuple[int, ...]]
    """The shape of each device's part of it."""
    outputs: list[tuple[int, ...]]
    """The shape of each device's logits."""


def last_step(recording: Recording) -> Recording:
    """The events after the last barrier, from time 0 on."""
    events = []
    for rank in recording.ranks:
        begin = ([0.0] + [event.end for event in rank.events if event.name == "barrier"])[-1]
        events.append([event for event in rank.events if event.start >= begin])
    first = min((event.start for its in events for event in its), default=0.0)
    shifted = [[replace(event, start=event.start - first, end=event.end - first) for event in its] for its in events]
    ranks = (replace(rank, events=tuple(its)) for rank, its in zip(recording.ranks, shifted, strict=True))
    return replace(recording, ranks=tuple(ranks))
