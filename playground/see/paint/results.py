"""What the runs give that figures are drawn from. Plain data: reading it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from playground.runtime.rank import Event as Report
from playground.see.analyse.messages import Message, match_messages
from playground.see.record.recording import RankRecording, Recording

Held = tuple[float, ...]
"""The numbers that a rank has, or none."""
BARRIER = "barrier"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run gave."""

    results: list[Any]
    """Of its function, by rank."""
    recording: Recording | None = None
    """None where results alone are drawn, and recording would only take time."""
    arguments: tuple[Any, ...] = ()
    """What the function got besides rank and size."""
    reports: tuple[tuple[int, Report], ...] = ()
    """What ranks reported meanwhile, each with its rank, in order; of what is recorded, nothing."""

    @property
    def recorded(self) -> Recording:
        """The recording. Raises `ValueError` if there is none."""
        if self.recording is None:
            raise ValueError("this run was not recorded")
        return self.recording

    @property
    def messages(self) -> tuple[Message, ...]:
        """Those that were recorded, in the order in which they were sent."""
        return match_messages(self.recorded).matched


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a rank held before and after."""

    before: Held
    after: Held


@dataclass(frozen=True, kw_only=True)
class SgdStep:
    """One step of synchronous SGD, as one weight of the model sees it on one rank."""

    weight: float
    """Before the step."""
    gradient: float
    """Of this rank's samples."""
    average: float
    """Over all ranks."""
    new_weight: float
    lr: float
    samples: int
    """Of this rank."""
    parameters: int
    replicas_max_difference: float
    """After the step: the largest of any parameter between a rank and rank 0."""


@dataclass(frozen=True, kw_only=True)
class BucketSent:
    """A bucket of gradients that DistributedDataParallel has sent."""

    number: int
    bytes: int
    parameters: tuple[int, ...]
    """Numbers of the parameters whose gradients are in it, in the order of the model."""
    left: float
    """Seconds after the beginning of backward."""
    done: float
    """When the sum was there, also."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One backward of DistributedDataParallel."""

    names: tuple[str, ...]
    """Of the parameters, in the order of the model."""
    ready: tuple[tuple[int, float], ...]
    """Parameters in the order in which their gradients got ready, and seconds after the beginning of backward."""
    sent: tuple[BucketSent, ...]
    """The buckets, in the order in which they left."""
    seconds: float
    """Until backward was over, which is when every gradient was averaged."""


@dataclass(frozen=True, kw_only=True)
class DataParallelStep:
    """A step of DataParallel by one way to the loss."""

    gather: str
    """What is gathered: a name of `playground.lessons.data_parallel.page.WAYS`."""
    batch: tuple[int, ...]
    """The shape of what is scattered."""
    chunks: list[tuple[int, ...]]
    """Of each device: the shape of its part."""
    outputs: list[tuple[int, ...]]
    """Of each device: the shape of its logits."""


def last_step(recording: Recording) -> Recording:
    """What came after the last barrier, from time 0 on."""
    ranks = [after_last_barrier(rank) for rank in recording.ranks]
    start = min((event.start for rank in ranks for event in rank.events), default=0.0)
    return replace(recording, ranks=tuple(shift(rank, -start) for rank in ranks))


def after_last_barrier(rank: RankRecording) -> RankRecording:
    ends = [event.end for event in rank.events if event.name == BARRIER]
    begin = ends[-1] if ends else 0.0
    return replace(rank, events=tuple(event for event in rank.events if event.start >= begin))


def shift(rank: RankRecording, seconds: float) -> RankRecording:
    """The same, so much later."""
    events = (replace(event, start=event.start + seconds, end=event.end + seconds) for event in rank.events)
    return replace(rank, events=tuple(events))
