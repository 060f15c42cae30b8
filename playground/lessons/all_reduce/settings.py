"""What the lesson runs: one object from the command line to the ranks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.algorithms import ALGORITHMS, OURS, AlgorithmSpec
from playground.runtime.checks import check_choice
from playground.runtime.errors import UsageError

MAX_ELEMENTS = 64
"""As many as can still be read; `bench` takes larger tensors."""
PHASES = {"reduce-scatter": ("reduce_scatter", "ring"), "all-gather": ("all_gather", "ring")}
"""The phases of the ring by themselves: (collective, algorithm)."""
TRACEABLE = {name: ("all_reduce", name) for name, spec in ALGORITHMS.items() if not spec.chooses} | PHASES
"""Everything that can be run step by step, by name: (collective, algorithm)."""
ALL_ALGORITHMS = tuple(name for name in TRACEABLE if name not in PHASES)
"""What is run unless something else is asked for."""
STORY = tuple(name for name in ALL_ALGORITHMS if ALGORITHMS[name].in_story)
"""What is then shown step by step; the table at the end has all."""


def spec_of(name: str) -> AlgorithmSpec:
    """The specification of something traceable."""
    collective, algorithm = TRACEABLE[name]
    return OURS[collective][algorithm]


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings:
    """Raises `UsageError` for what cannot be run, or not be read."""

    size: int
    """Number of ranks."""
    names: tuple[str, ...] = ALL_ALGORITHMS
    """Of `TRACEABLE`, in the order of running."""
    elements: int | None = None
    """Of the tensor; None for as many as ranks."""

    def __post_init__(self) -> None:
        if self.elements is None and self.size > MAX_ELEMENTS:
            raise UsageError(f"{self.size} ranks with an element each are more than can be read: choose --elements")
        if self.elements is not None and not 1 <= self.elements <= MAX_ELEMENTS:
            raise UsageError(f"{self.elements} elements: choose 1 to {MAX_ELEMENTS}")
        for name in self.names:
            check_choice("algorithm", name, TRACEABLE)
            if name in PHASES and self.numel % self.size:
                raise UsageError(
                    f"--algorithm {name}: {self.numel} elements are not {self.size} equal shares, and every rank's "
                    f"share has the same size: choose a multiple of {self.size} as --elements"
                )

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.size if self.elements is None else self.elements
