"""BERT, the encoder that tutorials on data parallelism train: on sentence pairs, with a head of three classes.

Its parameters are called as those of `transformers` are, so that published weights load by name.
Source: Devlin et al., BERT, 2019, arXiv 1810.04805; Vaswani et al., Attention Is All You Need, 2017, arXiv 1706.03762
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from playground.training.bert_config import CLASSES, BertConfig


class Embeddings(nn.Module):
    """Token ids and segments, both [batch, length] → [batch, length, width]: word + position + segment."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_length, config.width)
        self.token_type_embeddings = nn.Embedding(config.segments, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        words = self.word_embeddings(input_ids)
        return self.dropout(self.LayerNorm(words + positions + self.token_type_embeddings(token_type_ids)))


class SelfAttention(nn.Module):
    """Every token takes a mean over all tokens' values, weighted by how well its query fits their keys."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, length, width / heads]
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, dropout).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """The end of both halves of a layer: `dense`, dropout, the half's own input added, then the norm ("post-norm")."""

    def __init__(self, features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(features, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(before + self.dropout(self.dense(hidden)))


class Layer(nn.Module):
    """Attention between tokens, then a feed-forward network on each: [batch, length, width] → the same shape."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Residual(config.width, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.width, config.intermediate)})
        self.output = Residual(config.intermediate, config)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(F.gelu(self.intermediate["dense"](attended)), attended)


class Bert(nn.Module):
    """Token ids, segments and mask, all [batch, length] → the pooled first token, [batch, width]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.width, config.width)})
        self.apply(partial(initialize, width=config.width))

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.embeddings(input_ids, token_type_ids)
        mask = attention_mask[:, None, None, :]  # the same for every head and every query
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        return torch.tanh(self.pooler["dense"](hidden[:, 0]))


class Model(nn.Module):
    """The model that the tutorials train: the encoder, dropout and a linear layer. Returns logits, [batch, 3].

    `attention_mask` is True where there is a token, False at padding.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, CLASSES)
        initialize(self.classifier, config.width)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        return self.classifier(self.dropout(self.bert(input_ids, token_type_ids, attention_mask)))


def initialize(module: nn.Module, width: int) -> None:
    """Draw weights from a normal distribution, biases are zero. Its deviation is BERT's, 0.02, at a width of 768; in
    a narrower model it is larger, so that what a layer puts out is not smaller."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02 * (768 / width) ** 0.5)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
