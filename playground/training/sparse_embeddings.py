"""A gradient synchronisation for embeddings: of their gradient only the rows in use
travel.

A batch holds few of the words of a vocabulary; the rows of all others have a gradient of zero.
Dense, the gradient of 30,000 words of width 384 is a message of 46 MB, and it is ready last, when
no backward is left to hide it behind. Here the ranks first agree on which rows any of them has
used: then those are a dense message of one shape, less than 1 MB for a batch of 500 words, which
any all-reduce adds up. Source: https://horovod.readthedocs.io/en/stable/api.html (allreduce of
tf.IndexedSlices: gathers all ranks' rows)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from playground.base.upstream import parts_of_sparse, version_of
from playground.training.averaging import BUCKET_CAP, AllReduceCall
from playground.training.step_settings import TOKENS
from playground.training.sync import OverlappedSync


class SparseEmbeddings(OverlappedSync):
    """Averages the gradients of embeddings, all of one type, by the rows that some rank has used,
    and all other gradients as `OverlappedSync` does.

    It sets `sparse` of the model's `nn.Embedding`s, so that backward computes (index, row) for each
    word of the batch in place of a matrix. `after_backward` leaves in every `param.grad` the mean
    as a dense gradient, for any optimizer. A weight that another module has too (a tied output
    layer) travels in the buckets; a dense gradient, where forward uses `embedding.weight[:length]`,
    counts as one that uses every row.
    """

    def __init__(
        self,
        model: nn.Module,
        all_reduce: AllReduceCall = dist.all_reduce,
        bucket_cap: int = BUCKET_CAP,
    ) -> None:
        self.weights = use_sparse_gradients(model)
        super().__init__(model, all_reduce, bucket_cap, excluded=set(self.weights))
        self.means = [torch.zeros_like(weight, requires_grad=False) for weight in self.weights]
        """Kept, since to zero 46 MB in every step would take longer than to send the rows."""
        self.rows = [
            torch.empty(0, dtype=torch.int64, device=weight.device) for weight in self.weights
        ]
        """Those of `means` that are not zero, unless somebody else has written there since."""
        self.versions = [version_of(mean) for mean in self.means]

    def after_backward(self) -> None:
        # before the rows on every rank, for the order of messages must be the same
        self.start_remaining()
        if self.weights:
            self.average_rows()
        self.finish()

    def average_rows(self) -> None:
        used = torch.cat([rows_used(weight) for weight in self.weights])
        self.all_reduce(used, op=dist.ReduceOp.MAX)  # 1 where some rank uses the row
        kept = zip(self.weights, self.means, self.rows, self.versions, strict=True)
        for weight, mean, rows, version in kept:
            if weight.grad is None or weight.grad.is_sparse:
                mean[rows if version_of(mean) == version else slice(None)] = 0
                mean += 0 if weight.grad is None else weight.grad
            else:
                mean.copy_(weight.grad)
        masks = used.split([len(weight) for weight in self.weights])
        self.rows = [mask.nonzero().squeeze(1) for mask in masks]
        parts = [
            mean[rows] * (1 / dist.get_world_size())
            for mean, rows in zip(self.means, self.rows, strict=True)
        ]
        flat = torch.cat([part.flatten() for part in parts])
        if len(flat):
            self.all_reduce(flat, op=dist.ReduceOp.SUM)
        averaged = flat.split([part.numel() for part in parts])
        for weight, mean, rows, part in zip(
            self.weights, self.means, self.rows, averaged, strict=True
        ):
            mean[rows] = part.view(-1, mean.shape[1])
            weight.grad = mean
        self.versions = [version_of(mean) for mean in self.means]


def rows_used(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [rows]: 1 where this rank has a gradient."""
    used = torch.zeros(len(weight), dtype=torch.uint8, device=weight.device)
    if weight.grad is None:
        return used
    if weight.grad.is_sparse:
        indices, _ = parts_of_sparse(weight.grad)  # [1, entries]
        used[indices[0]] = 1
    else:
        used[:] = 1
    return used


def use_sparse_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Let backward compute sparse gradients where a weight is used by plain embeddings alone.
    Returns these weights."""
    plain = [
        each
        for each in model.modules()
        if isinstance(each, nn.Embedding) and not each.scale_grad_by_freq
    ]
    others = {
        p
        for module in model.modules()
        if module not in plain
        for p in module.parameters(recurse=False)
    }
    sparse = [each for each in plain if each.weight.requires_grad and each.weight not in others]
    for embedding in sparse:
        embedding.sparse = True
    return list(dict.fromkeys(embedding.weight for embedding in sparse))


@dataclass(frozen=True)
class TokenSizes:
    """Sizes of an encoder. By default it has a vocabulary as real tokenizers have: six of seven
    parameters are word embeddings."""

    vocabulary: int = 30_000
    width: int = 384
    """Features of a token between two layers."""
    layers: int = 1
    heads: int = 6
    intermediate: int = 1536
    """Features inside a layer's feed-forward part."""
    max_length: int = 32


CLASSES, PADDING = 3, 0


class ZipfSequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token ids [max_length], padded behind; label: the class of the first token. As in a text, the
    k-th most frequent word is 1/k times as frequent as the first (Zipf's law). The same on every
    rank; `limit` keeps the first."""

    def __init__(self, limit: int | None = None, config: TokenSizes = TokenSizes()) -> None:
        draw, longest = torch.Generator().manual_seed(1935), config.max_length
        frequencies = 1 / torch.arange(1, config.vocabulary, dtype=torch.float64)
        words = (
            frequencies.multinomial(TOKENS.train * longest, replacement=True, generator=draw) + 1
        )
        lengths = torch.randint(longest // 2, longest + 1, (TOKENS.train, 1), generator=draw)
        self.ids = words.view(-1, longest).masked_fill(torch.arange(longest) >= lengths, PADDING)[
            :limit
        ]
        self.labels = self.ids[:, 0] % CLASSES

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[index], self.labels[index]


class TokenBert(nn.Module):
    """Token ids [batch, length] → log-probabilities [batch, 3], from the first token."""

    def __init__(self, config: TokenSizes = TokenSizes()) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width, padding_idx=PADDING)
        self.positions = nn.Embedding(config.max_length, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.intermediate, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(config.width, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + self.positions.weight[: ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=ids == PADDING)
        return F.log_softmax(self.classifier(hidden[:, 0]), dim=1)
