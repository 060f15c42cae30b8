"""A tiny GPT that is put together from units, sequences to copy that it is trained on, and the
learning rate of each step.

The model's children are the embedding, the blocks and the head. Each draws its parameters from a
generator of its own, so that a rank can build any of them and they are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from playground.world import device

NUMBERS = SEPARATOR = 40  # 0 to 39 are copied; 40 separates them from their copy
IGNORED = -100  # the target of a token that has none, as in `F.cross_entropy`
LR, WARM_UP = 3e-3, 20
"""AdamW's learning rate, and in how many steps it grows to that: the loss is below 0.1 by step
70."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both [batch, length]."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes that 2, 3 and 4 divide. There is no dropout: ranks with shards of a tensor would have
    to shard its mask."""

    layers: int = 2
    width: int = 96
    heads: int = 12
    length: int = 48
    vocabulary: int = 48


class Embed(nn.Module):
    """Token ids [batch, length] → [batch, length, width]: token + position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Attention(nn.Module):
    """Causal: [batch, length, width] → the same, with as many heads as `query` has outputs for.
    The key has no bias: its gradient would be rounding alone, which Adam scales to a whole step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = (project(hidden) for project in (self.query, self.key, self.value))
        heads = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in projected)
        return self.output(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, length, head width] → the same."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention between tokens, then an MLP on each, both added to their input:
    [batch, length, width] → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


def new_gpt(config: GPTConfig, seed: int) -> nn.Sequential:
    """A GPT, in float32 on the CPU: ids [batch, length] → logits [batch, length, vocabulary]."""
    return nn.Sequential(*(new_unit(config, seed, unit) for unit in range(config.layers + 2)))


def new_unit(config: GPTConfig, seed: int, unit: int) -> nn.Module:
    """A child of the model: 0 is the embedding, the last the head. It draws from a generator of its
    own, whole, so that it is the same however the model is sharded. Biases are drawn, too: one that
    is added twice must show."""
    module: nn.Module
    if unit == 0:
        module = Embed(config)
    elif unit <= config.layers:
        module = Block(config)
    else:
        logits = nn.Linear(config.width, config.vocabulary, bias=False)
        module = nn.Sequential(nn.LayerNorm(config.width), logits)
    generator = torch.Generator().manual_seed(1000 * seed + unit)
    for part in module.modules():
        for param in () if isinstance(part, nn.LayerNorm) else part.parameters(recurse=False):
            nn.init.normal_(param, std=0.05, generator=generator)
    return module


def copying(samples: int, generator: torch.Generator, length: int = 48) -> tuple[Tensor, Tensor]:
    """Tokens and targets [samples, length]: random numbers, the separator, the numbers again; those
    have targets."""
    numbers = torch.randint(NUMBERS, (samples, length // 2), generator=generator)
    separator = torch.full((samples, 1), SEPARATOR)
    tokens = torch.cat([numbers, separator, numbers[:, :-1]], dim=1)
    return tokens, torch.cat([torch.full_like(numbers, IGNORED), numbers], dim=1)


def batches(samples: int, steps: int, seed: int) -> list[Batch]:
    """A batch for each step, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (copying(samples, generator) for _ in range(steps))
    return [(tokens.to(device()), targets.to(device())) for tokens, targets in drawn]


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of step `step`, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)


def copying_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
