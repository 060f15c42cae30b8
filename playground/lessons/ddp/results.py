"""What the parts of the lab found, and whether it is as it must be. Plain data: reading it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.errors import PlaygroundError

ROUNDING = 1e-12
"""How far apart two sums of the same float64 numbers may be, relative to their norm."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one vector is from another."""

    max: float
    """The largest difference of an element."""
    relative: float
    """The norm of the difference, relative to that of the other vector."""

    @property
    def is_rounding(self) -> bool:
        """Whether two float64 vectors differ by rounding only. False if the difference is not a number."""
        return self.relative <= ROUNDING


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a rank handed to all_reduce."""

    type: str
    """Of its elements, as torch calls it."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """A bucket of gradients, as it left."""

    bucket: int
    """Its number."""
    bytes: int
    ready: int
    """How many gradients of the model were ready by then."""
    parameters: list[str]
    """The names of those whose gradients are in it."""


@dataclass(frozen=True, kw_only=True)
class CapBuckets:
    """The buckets that DDP built for one bucket cap."""

    bucket_cap_mb: float
    """MiB."""
    first: list[SentBucket]
    """Those of the first backward, as they left."""
    rebuilt: list[SentBucket]
    """Those of all later ones."""
    rebuilt_before: int
    """The backward that first had them, counted from 1."""
    seconds: float
    """Of a step, on its slowest rank; the median."""


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Memory that gradients take after a backward."""

    gradient_as_bucket_view: bool
    gradients: int
    """Bytes."""
    outside: int
    """Bytes of those that are held beside the buckets, not in them."""


@dataclass(frozen=True, kw_only=True)
class BucketsResult:
    order: list[str]
    """The names of the parameters, as their gradients got ready."""
    caps: list[CapBuckets]
    memory: list[GradientMemory]


@dataclass(frozen=True, kw_only=True)
class HookResult:
    """What a communication hook sends, and what it makes of gradients and parameters."""

    hook: str
    types: list[str]
    """Of what it sends."""
    messages: int
    """Per step."""
    bytes: int
    """Per step."""
    gradient: Difference
    """Between the first gradient and its exact mean over all ranks."""
    loss: float
    """The mean loss of the last step."""
    parameters: Difference
    """Between the parameters in the end and those without a hook."""


@dataclass(frozen=True, kw_only=True)
class RefusedHook:
    """A hook that torch or the backend cannot do."""

    hook: str
    refused: str
    """Their words."""


@dataclass(frozen=True, kw_only=True)
class AccumulationResult:
    """Gradients of several batches, added up in one way."""

    way: str
    batches: int
    messages: int
    difference: Difference
    """Between its gradients and those of one batch of all samples."""

    def check(self) -> None:
        """Raise `PlaygroundError` if its gradients differ by more than rounding."""
        if not self.difference.is_rounding:
            raise PlaygroundError(
                f"{self.way}: gradients differ by {self.difference.relative}, more than rounding does"
            )


@dataclass(frozen=True, kw_only=True)
class EarlyTermination:
    """What happens where Join is to raise as soon as one rank is done."""

    steps: int
    """Which this rank took."""
    says: str | None
    """What Join said; None if nobody had to wait."""


@dataclass(frozen=True, kw_only=True)
class UnevenResult:
    """Training under Join on a rank that has batches of its own number."""

    batches: int
    steps: int
    messages: int
    """All-reduces of gradients that it took part in."""
    difference: float
    """The largest difference of any parameter or buffer to that on rank 0, in the end."""
    without_joining: EarlyTermination


@dataclass(frozen=True, kw_only=True)
class SamplerResult:
    """Who gets which sample, in one way of sharing them out."""

    way: str
    mine: list[int]
    """The positions of this rank's samples, in order."""
    doubled: list[int]
    """Positions of samples that are used twice or more, on any ranks."""
    left_out: list[int]
    """Positions of samples that nobody gets."""


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """Training that went on from a checkpoint."""

    loaded: str
    """What it took from the file."""
    difference: Difference
    """Between its parameters in the end and those of a run that was never interrupted."""


@dataclass(frozen=True, kw_only=True)
class CheckpointResult:
    """What one rank had to do with a checkpoint."""

    steps: int
    """Taken before it, and once more after it."""
    written: int
    """Bytes; 0 on all ranks but one."""
    read: int
    """Bytes."""
    device: str
    """Where what was read is put."""
    resumed: list[ResumedRun]
    """With the state of the model alone, and with all."""

    def check(self) -> None:
        """Raise `PlaygroundError` unless the run that took everything from the file ends bit-identical."""
        if self.resumed[-1].difference.max != 0:
            raise PlaygroundError(
                f"resumed from the checkpoint, parameters differ by up to {self.resumed[-1].difference.max:.2g} "
                f"from those of an uninterrupted run: they must not at all"
            )


def check_replicas(difference: float, when: str) -> None:
    """Raise `PlaygroundError` if replicas that must be bit-identical differ."""
    if difference != 0:
        raise PlaygroundError(f"{when} replicas differ by up to {difference:.2g}: they must not at all")


def check_buckets(recorded: list[object]) -> None:
    """Raise `PlaygroundError` unless every rank, in rank order, recorded the same buckets."""
    if any(theirs != recorded[0] for theirs in recorded):
        raise PlaygroundError("the ranks' buckets differ, though all must send the same ones in the same order")
