"""The sizes of a tiny GPT. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 96, 12, 48, 48  # sizes that 2, 3 and 4 divide


@dataclass(frozen=True)
class GPTConfig:
    """There is no dropout: ranks with parts of a tensor would have to cut its mask."""

    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    length: int = LENGTH
    vocabulary: int = VOCABULARY
