"""The sizes of a BERT, those of the board's `BertConfig`, for what does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.errors import UsageError

CLASSES = 3
"""Entailment, neutral, contradiction."""


@dataclass(frozen=True, kw_only=True)
class BertSizes:
    """Raises `UsageError` for sizes that no encoder can have. The defaults are those of the small
    one from scratch."""

    vocabulary: int
    """Rows of the word embeddings."""
    width: int = 128
    """Features of a token between two layers."""
    layers: int = 2
    heads: int = 4
    intermediate: int = 512
    """Features inside a layer's feed-forward part."""
    max_length: int = 64
    """Rows of the position embeddings: no sequence may be longer."""
    segments: int = 2
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UsageError(
                f"a BERT of width {self.width} with {self.heads} heads: the heads must divide the "
                "width"
            )

    @property
    def parameters(self) -> int:
        """How many there are in the encoder with its pooler and the head of `CLASSES` classes."""
        width, inside = self.width, self.intermediate
        embeddings = (self.vocabulary + self.max_length + self.segments + 2) * width
        layer = 4 * (width + 1) * width + (width + 1) * inside + (inside + 1) * width + 4 * width
        return embeddings + self.layers * layer + (width + 1) * width + (width + 1) * CLASSES
