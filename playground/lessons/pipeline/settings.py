"""What a run of `pipeline` depends on: one object from the command line to the ranks. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from playground.lessons.pipeline.schedules import SCHEDULES
from playground.runtime.checks import check_at_least_one, check_choice
from playground.runtime.errors import UsageError

BLOCKS = 24
"""Equal blocks that the model is made of, so that it can be cut into equal stages."""
WIDTH = 28 * 28
"""Features that each block takes and gives: an image's pixels."""
WARM_UP = 1
"""Training steps that are not timed: the first one opens connections and fetches memory."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Raises `UsageError` for a grid, stages or microbatches that do not fit."""

    size: int
    """Number of ranks: stages x replicas."""
    folder: Path
    """Holds the four data files."""
    dataset: str = "digits"
    """What they are: mnist or digits."""
    limit: int | None = None
    """Train on the first so many samples; None for all."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Of `SCHEDULES`, in the order of running."""
    microbatches: int = 8
    """That each replica cuts its part of a batch into."""
    data_parallel: int = 1
    """Replicas of the pipeline."""
    batch_size: int = 512
    """Of all replicas together."""
    steps: int = 5
    """Training steps with each schedule, after those that warm up."""
    lr: float = 0.02
    momentum: float = 0.9
    seed: int = 1234

    def __post_init__(self) -> None:
        check_at_least_one(self, "size", "microbatches", "data_parallel", "batch_size", "steps")
        for name in self.schedules:
            check_choice("schedule", name, SCHEDULES)
        if self.size % self.data_parallel:
            raise UsageError(
                f"--data-parallel {self.data_parallel} on {self.size} ranks: a grid has stages x replicas ranks, so "
                f"choose a multiple of {self.data_parallel} as -n"
            )
        if BLOCKS % self.stages:
            raise UsageError(
                f"{self.stages} stages: the model's {BLOCKS} equal blocks can be cut into {either(divisors(BLOCKS))} "
                f"equal stages, so choose one of these, times --data-parallel, as -n"
            )
        self.check_microbatches()

    def check_microbatches(self) -> None:
        """Raise `UsageError` unless a batch can be cut into equal microbatches, on every replica."""
        if self.batch_size % self.data_parallel:
            raise UsageError(
                f"--batch-size {self.batch_size} for {self.data_parallel} replicas: each gets an equal part, so choose "
                f"a multiple of {self.data_parallel}"
            )
        part = self.batch_size // self.data_parallel
        if part % self.microbatches:
            of = f"a replica's {part} of the {self.batch_size} samples" if self.data_parallel > 1 else f"{part} samples"
            raise UsageError(
                f"--microbatches {self.microbatches}: microbatches are equal, and {of} in a batch make "
                f"{either(divisors(part))} of them: choose one of these, or another --batch-size"
            )

    @property
    def stages(self) -> int:
        return self.size // self.data_parallel

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.batch_size // self.data_parallel // self.microbatches

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(f"--batch-size {self.batch_size}: there are {samples} samples to train on, choose no more")

    def on_all_ranks(self) -> dict[str, object]:
        """What must be the same on every rank: everything but the folder, which is each host's own."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def either(numbers: list[int]) -> str:
    """Numbers in words: 1, 2 or 4."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
