"""What is counted of a training step by ZeRO's stages, for the figure of zero. Does not
import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WaysSettings:
    """A GPT, and the ways to train it: names of `playground.training.zero_sync.SYNCS`, and of
    `playground.figures.counting.TORCH_SYNCS`."""

    ways: tuple[str, ...]
    layers: int = 2
    width: int = 96
    """A multiple of the GPT's 12 heads."""
    dtype: str = "float32"
    """The type that layers compute in. With bfloat16, shards are float32."""
    reduce_dtype: str = "float32"
    """The type that gradients are reduced in, with bfloat16."""
    checkpoint_activations: bool = False
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """Bytes of a step by one way, on one rank, with one sequence for each rank, so that activations
    are few."""

    way: str
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
