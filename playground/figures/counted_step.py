"""What is counted of a training step by ZeRO's stages, for the figure of zero. Does not
import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CountSettings:
    """A GPT, and the methods to train it: names of `playground.training.zero_sync.SYNCS`."""

    methods: tuple[str, ...]
    layers: int = 2
    width: int = 96
    """A multiple of the GPT's 12 heads."""
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """Bytes of a step by one method, on one rank, with one sequence for each rank, so that
    activations are few."""

    method: str
    parameters: float
    """Held before the optimizer's step, as are the next three."""
    gradients: float
    optimizer: float
    """The optimizer's state."""
    held: float
    """All three together."""
    peak: float
    """The most that is held at any moment of the step."""
    sent: float
    model_bytes: float
    """Bytes of the model's parameters."""
    series: dict[str, list[int]]
    """Bytes held after each operation of "forward", of backward until "synced", and of the
    "step"."""
