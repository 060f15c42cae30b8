"""Sentence pairs for the ranks, in batches as BERT takes them. The arrays are mapped into memory, not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from playground.lessons.bert.prepare import read_sizes

SPECIAL_TOKENS = 3
"""[CLS] premise [SEP] hypothesis [SEP]"""


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
    """A split ("train" or "test") of tokenised pairs, which gives whole batches.

    A pair of more than `max_length` tokens, 5 or more, loses the ends of its sentences, the longer one's first
    (`truncation=True` of transformers).
    """

    def __init__(self, folder: Path, split: str, max_length: int) -> None:
        self.sizes, self.max_length = read_sizes(folder), max_length
        self.tokens = map_file(folder / f"{split}-tokens.i32", torch.int32)
        self.offsets = map_file(folder / f"{split}-offsets.i64", torch.int64)
        self.labels = map_file(folder / f"{split}-labels.u8", torch.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: Sequence[int]) -> PairBatch:
        wanted = torch.tensor(positions, dtype=torch.int64)
        premise, hypothesis, end = (self.offsets[2 * wanted + i].unsqueeze(1) for i in range(3))
        first, second = truncate(hypothesis - premise, end - hypothesis, self.max_length - SPECIAL_TOKENS)
        total = first + second + SPECIAL_TOKENS
        column = torch.arange(int(total.max()) if len(wanted) else SPECIAL_TOKENS)

        in_premise = column <= first + 1  # with [CLS] and the first [SEP]
        source = torch.where(in_premise, premise - 1 + column, hypothesis - first - 2 + column)
        ids = self.tokens[source.clamp_(0, len(self.tokens) - 1)].long()
        ids.masked_fill_((column == first + 1) | (column == total - 1), self.sizes["sep"])
        ids.masked_fill_(column >= total, self.sizes["pad"])
        ids[:, 0] = self.sizes["cls"]
        mask = column < total
        return PairBatch(ids, (~in_premise & mask).long(), mask, self.labels[wanted].long())


def truncate(first: torch.Tensor, second: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens of two sentences fit into `room`: the shorter one may have half of it, the longer the rest."""
    shorter = torch.minimum(first, second).clamp_(max=room // 2)
    longer = torch.minimum(torch.maximum(first, second), room - shorter)
    return torch.where(first <= second, shorter, longer), torch.where(first <= second, longer, shorter)


def map_file(file: Path, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(file), shared=False, size=file.stat().st_size // dtype.itemsize, dtype=dtype)
