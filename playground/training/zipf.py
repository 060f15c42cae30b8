"""Token ids in the place of images: sequences as text would give them, and the BERT that reads them.

Nothing is downloaded. Communication depends on which rows of the embeddings a batch uses, and that depends on
how often words occur: in a text, the k-th most frequent word about 1/k times as often as the first.
Source: Zipf, Human Behavior and the Principle of Least Effort, 1949
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from playground.training.bert import Model
from playground.training.bert_config import CLASSES, BertConfig
from playground.training.models import TOKEN_SEQUENCES

CONFIG = BertConfig(vocabulary=30_000, width=384, layers=1, heads=6, intermediate=1536, max_length=32)
"""As wide as MiniLM, with the vocabulary of a WordPiece tokenizer: six of seven parameters are word embeddings."""
PADDING = 0


class ZipfSequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences of token ids [max_length] int64, half of it or more in use and padding behind; label int64: the class
    that the first token belongs to. The same on every rank, and in every run. `limit` keeps the first."""

    def __init__(self, limit: int | None = None, config: BertConfig = CONFIG) -> None:
        generator = torch.Generator().manual_seed(1935)
        frequencies = 1 / torch.arange(1, config.vocabulary, dtype=torch.float64)
        words = frequencies.multinomial(TOKEN_SEQUENCES * config.max_length, replacement=True, generator=generator) + 1
        lengths = torch.randint(
            config.max_length // 2, config.max_length + 1, (TOKEN_SEQUENCES, 1), generator=generator
        )
        padded = torch.arange(config.max_length) >= lengths
        self.ids = words.view(lengths.numel(), -1).masked_fill(padded, PADDING)[:limit]
        self.labels = self.ids[:, 0] % CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[position], self.labels[position]

    def __getitems__(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Many at once: ids [n, max_length], labels [n]."""
        wanted = torch.tensor(positions, dtype=torch.int64)
        return self.ids[wanted], self.labels[wanted]


class TokenBert(nn.Module):
    """Token ids [batch, length] → log-probabilities [batch, 3]: BERT, told that all tokens are of the first segment."""

    def __init__(self, config: BertConfig = CONFIG) -> None:
        super().__init__()
        self.model = Model(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.model(ids, torch.zeros_like(ids), ids != PADDING), dim=1)
