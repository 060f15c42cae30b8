"""Sentence pairs for the ranks, in batches as BERT takes them. The arrays are mapped into memory,
not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from playground.lessons.bert.lesson import pad
from playground.lessons.bert.prepare import read_sizes
from playground.training.data import map_file


class PairBatch(NamedTuple):
    input_ids: torch.Tensor
    """[batch, length] int64: padded to the longest pair of the batch."""
    token_type_ids: torch.Tensor
    """[batch, length] int64, the segments: 1 at the hypothesis and the [SEP] after it."""
    attention_mask: torch.Tensor
    """[batch, length] bool: False at padding."""
    labels: torch.Tensor
    """[batch] int64: 0 entailment, 1 neutral, 2 contradiction."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.input_ids, self.token_type_ids, self.attention_mask

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PairBatch:
        return PairBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


class Pairs(Dataset[PairBatch]):
    """A split ("train" or "test") of tokenised pairs, which gives whole batches."""

    def __init__(self, folder: Path, split: str) -> None:
        self.sizes = read_sizes(folder)
        self.tokens = map_file(folder / f"{split}-tokens.i32").view(torch.int32)
        self.offsets = map_file(folder / f"{split}-offsets.i64").view(torch.int64)
        self.labels = map_file(folder / f"{split}-labels.u8")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: Sequence[int]) -> PairBatch:
        parts = [self.tokens[self.offsets[place] : self.offsets[place + 1]] for place in positions]
        inputs = pad(parts, self.sizes["pad"], self.sizes["sep"])
        return PairBatch(*inputs, self.labels[torch.tensor(positions)].long())
