"""What the ladder measured, and whether the replicas are still one model. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.measurement.environment import Environment
from playground.training.results import replicas_verdict

PARTS = ("forward", "backward", "exposed", "step")
"""Of a training step, in order."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Median seconds of the parts of a step (what each part is: timed_replica.py)."""

    forward: float
    backward: float
    exposed: float
    step: float


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """One rung, or DistributedDataParallel, on all ranks together. Times in seconds.

    The parts of a step are medians over its rounds; of each round, those of the rank that came last to the averaging:
    it waits for messages, and not for slower ranks.
    """

    rung: str
    """Its name."""
    p50: float
    """The median time of a step on its slowest rank."""
    p95: float
    """The time on its slowest rank that 95 of 100 steps stay below."""
    forward: float
    """From zero_grad to the loss."""
    backward: float
    """From the loss to this rank's last gradient."""
    exposed: float
    """From there until all gradients are averaged; where it is parameters that are averaged, the time that takes."""
    step: float
    """The optimizer's step."""
    alone: float
    """Median time of the same averaging with no backward to hide behind, on the rank that came last to it."""
    hidden: float
    """The share of `alone` that is not exposed, 0 to 1."""
    messages: int
    """Per step, on the rank that sends most."""
    bytes: int
    """Of these messages; where only the rows in use of an embedding travel, in the first step."""
    early_bytes: int
    """Of those, what leaves before the last gradient is ready: no more can be hidden."""
    loss: float
    """The mean over the last global batch."""
    difference_to_ddp: float
    """The largest difference of any parameter to DistributedDataParallel's, on any rank."""
    replicas_max_difference: float
    """The largest difference of any parameter or buffer between a rank and rank 0."""
    speed_to_first: float
    """How many times as fast as the first rung, by `p50`."""
    speed_to_ddp: float
    """How many times as fast as DistributedDataParallel, by `p50`."""
    caveat: str = ""
    """Why `hidden` is less than it could be, where the backend keeps DistributedDataParallel from hiding messages."""


@dataclass(frozen=True, kw_only=True)
class LadderResult:
    rungs: list[RungResult]
    """In order; the last is DistributedDataParallel."""
    parts: list[dict[str, StepParts]]
    """Of each rank, by rung: medians on that rank alone."""
    environment: Environment
    """The machine and the software it was measured with."""


def agreement(rungs: Sequence[RungResult], all_reduce: str) -> str:
    """What to say of the replicas, after as many steps on every rung.

    Raises `PlaygroundError` if those of a rung that adds with `all_reduce`, or those of DistributedDataParallel, which
    is the last, differ though they must not.
    """
    verdicts = {}
    for rung in rungs:
        difference = rung.replicas_max_difference
        verdicts[difference] = replicas_verdict(difference, None if rung is rungs[-1] else all_reduce)
    return verdicts[max(verdicts)]
