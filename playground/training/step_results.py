"""The results of a measurement of training steps. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from playground.measurement.environment import Environment


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a training step, in order: medians over the steps, in seconds."""

    forward: float
    backward: float
    """Until the last gradient is ready."""
    exposed: float
    """From then until all gradients are averaged."""
    step: float
    """The optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class Variant(StepParts):
    """A training step with one gradient synchronisation, or with DistributedDataParallel, on all
    ranks together; its parts are those of the rank that is the last to start averaging."""

    alone: float
    """Seconds that the same averaging takes without a backward to hide behind."""
    hidden: float
    """Share of `alone` that is not exposed, from 0 to 1."""
    messages: int
    """Number of messages per step, on the rank that sends most (where only the rows in use of an
    embedding travel, in the first step)."""
    bytes: int
    """Bytes of these messages."""
    early_bytes: int
    """Bytes of those that leave before the last gradient is ready."""
    difference_to_ddp: float
    """The largest difference of any parameter from DistributedDataParallel's, on any rank."""
    name: str
    p50: float
    """Median seconds of a step, on its slowest rank."""
    loss: float
    """Mean over the last global batch."""
    replicas_max_difference: float
    """The largest difference of any parameter between a rank and rank 0 (BatchNorm's statistics are
    each rank's own)."""
    speed_to_first: float
    """How many times as fast as the first variant."""
    speed_to_ddp: float
    """How many times as fast as DistributedDataParallel."""
    caveat: str
    """Why `hidden` is less than it could be, where the backend keeps DistributedDataParallel from
    hiding messages; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The measurement of all variants, the same on every rank."""

    variants: list[Variant]
    """In order; the last is DistributedDataParallel."""
    parts: list[dict[str, StepParts]]
    """The parts of a step, by rank and by variant's name."""
    environment: Environment


PARTS = tuple(part.name for part in fields(StepParts))
