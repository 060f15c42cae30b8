"""What was measured of the schedules, and what it comes to. Plain data: reading it does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from playground.lessons.pipeline.schedules import SCHEDULES, ScheduleSpec
from playground.runtime.errors import PlaygroundError

EXACT = 1e-12
"""How far gradients in float64 may be from one process's: rounding, for microbatches are added up in another order."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A forward or a backward of one microbatch in one stage. Times are seconds on a clock that all ranks share."""

    kind: str
    """F or B."""
    microbatch: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """What one rank has measured of one schedule."""

    gradient_difference: float
    """The largest difference of any gradient from one process's, in float64."""
    held: int
    """Microbatches whose activations it held at once, at most."""
    held_bytes: int
    """What autograd saved for them, in float32, parameters left out."""
    losses: list[float]
    """Of this replica's part of the batch, step by step, on the last stage; empty on the others."""
    steps: list[list[Slot]]
    """Of the steps that are timed: what it did, in order."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRun:
    """What all ranks have measured of one schedule."""

    name: str
    stages: int
    microbatches: int
    ranks: list[StageRun]
    """Replica by replica, and within each stage by stage."""

    @property
    def spec(self) -> ScheduleSpec:
        return SCHEDULES[self.name]

    @property
    def steps(self) -> list[list[list[Slot]]]:
        """The steps that are timed: of each, what every rank did."""
        return [list(step) for step in zip(*(rank.steps for rank in self.ranks), strict=True)]

    @property
    def typical(self) -> list[list[Slot]]:
        """The step whose bubble is the median."""
        return sorted(self.steps, key=bubble)[len(self.steps) // 2]

    @property
    def bubble(self) -> float:
        """The median of all steps."""
        return bubble(self.typical)

    @property
    def expected_bubble(self) -> float:
        return self.spec.bubble(self.stages, self.microbatches)

    @property
    def gradient_difference(self) -> float:
        """The largest on any rank."""
        return max(rank.gradient_difference for rank in self.ranks)

    @property
    def losses(self) -> list[float]:
        """Of the whole batch, step by step."""
        return [mean(parts) for parts in zip(*(rank.losses for rank in self.ranks if rank.losses), strict=True)]

    def held(self, stage: int) -> int:
        """By that stage, in the replica that held most."""
        return max(rank.held for rank in self.ranks[stage :: self.stages])

    def held_bytes(self, stage: int) -> int:
        return max(rank.held_bytes for rank in self.ranks[stage :: self.stages])

    def expected_held(self, stage: int) -> int:
        return self.spec.held(stage, self.stages, self.microbatches)

    @property
    def summary(self) -> dict[str, object]:
        """As JSON shows it."""
        stages = range(self.stages)
        return {
            "bubble": self.bubble, "expected_bubble": self.expected_bubble, "step_seconds": span(self.typical),
            "held": [self.held(stage) for stage in stages],
            "expected_held": [self.expected_held(stage) for stage in stages],
            "held_bytes": [self.held_bytes(stage) for stage in stages],
            "gradient_difference": self.gradient_difference, "losses": self.losses,
        }  # fmt: skip

    def check(self) -> None:
        """Raise `PlaygroundError` if gradients are not one process's, or more is held than the schedule promises."""
        if not self.gradient_difference <= EXACT:
            raise PlaygroundError(
                f"{self.name}: gradients differ from one process's by {self.gradient_difference:.1e}, more than "
                f"rounding ({EXACT:.0e}): this must not be"
            )
        for stage in range(self.stages):
            if self.held(stage) != self.expected_held(stage):
                raise PlaygroundError(
                    f"{self.name}: stage {stage} held {self.held(stage)} microbatches, and {self.spec.held_rule} is "
                    f"{self.expected_held(stage)}: this must not be"
                )


def span(step: Sequence[Sequence[Slot]]) -> float:
    """Seconds from the first start to the last end, on any rank."""
    slots = [slot for rank in step for slot in rank]
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)


def bubble(step: Sequence[Sequence[Slot]]) -> float:
    """The share of the ranks' time in which they neither computed a forward nor a backward."""
    busy = sum(slot.seconds for rank in step for slot in rank)
    return 1 - busy / (len(step) * span(step))


def collect(
    by_rank: Sequence[Sequence[StageRun]], names: Sequence[str], stages: int, microbatches: int
) -> list[ScheduleRun]:
    """What every rank returned, schedule by schedule."""
    return [
        ScheduleRun(name=name, stages=stages, microbatches=microbatches, ranks=list(ranks))
        for name, ranks in zip(names, zip(*by_rank, strict=True), strict=True)
    ]
