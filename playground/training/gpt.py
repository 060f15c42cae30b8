"""A tiny GPT and a task that only attention solves, for the lessons in which a model is cut: small, but of real parts.

model = new_model(GPTConfig(), seed=1234)      # an nn.Sequential: Embed, a Block for each layer, Head
tokens, targets = copying(24, generator)       # both [24, 48]
loss = copying_loss(model(tokens), targets)    # 4.0 at first; ln 40 = 3.7 where attention exchanges nothing
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from playground.training.gpt_config import GPTConfig

LR, WARM_UP = 3e-3, 20  # AdamW's, and in how many steps it grows to that: below a loss of 0.1 by step 70
NUMBERS = SEPARATOR = 40  # 0 to 39 are copied; 40 separates them from their copy


class Embed(nn.Module):
    """Token ids [batch, length] → [batch, length, width]: token + position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions(self.place(ids))

    def place(self, ids: torch.Tensor) -> torch.Tensor:
        """The position of each of these tokens, [length]. To be replaced where a rank has a part of the sequence."""
        return torch.arange(ids.shape[1], device=ids.device)


class Attention(nn.Module):
    """Causal: [batch, length, width] → the same, with as many heads as `query` has rows for. The key has no bias: its
    gradient would be rounding alone, which Adam scales up to a whole step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query, self.key, self.value = (nn.Linear(config.width, config.width, bias=False) for _ in range(3))
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = (project(hidden) for project in (self.query, self.key, self.value))
        heads = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in rows)
        return self.output(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All [batch, heads, length, head width] → the same. To be replaced where other ranks have other keys."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention between tokens, then an MLP on each, both added to what came in: [batch, length, width] → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] → the same. To be replaced where there are several, and tokens choose among them."""
        return self.down(F.gelu(self.up(hidden)))


def new_model(config: GPTConfig, seed: int) -> nn.Sequential:
    """All units, in float32 on the CPU: ids [batch, length] → logits [batch, length, vocabulary]."""
    return nn.Sequential(*(new_unit(config, seed, unit) for unit in range(config.layers + 2)))


def new_unit(config: GPTConfig, seed: int, unit: int) -> nn.Module:
    """A child of the model: 0 is the embedding, the last the head. It draws from a generator of its own, whole, so that
    it is the same however the model is cut over ranks. Biases are drawn, too: one that is added twice must show."""
    head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False))
    module = Embed(config) if unit == 0 else Block(config) if unit <= config.layers else head
    generator = torch.Generator().manual_seed(1000 * seed + unit)
    for part in module.modules():
        for param in () if isinstance(part, nn.LayerNorm) else part.parameters(recurse=False):
            nn.init.normal_(param, std=0.05, generator=generator)
    return module


def copying(samples: int, generator: torch.Generator, length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [samples, length]: random numbers, the separator, the numbers again; those have targets."""
    numbers = torch.randint(NUMBERS, (samples, length // 2), generator=generator)
    tokens = torch.cat([numbers, torch.full((samples, 1), SEPARATOR), numbers[:, :-1]], dim=1)
    return tokens, torch.cat([torch.full_like(numbers, -100), numbers], dim=1)  # cross_entropy ignores -100


def copying_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of step `step`, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)
