"""The batches on which figures train the tiny GPT, sequences to copy, and the learning rate of each
step."""

from __future__ import annotations

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
from torch import Tensor

from playground.training.tiny_gpt import copying
from playground.world import device

LR, WARM_UP = 3e-3, 20
"""AdamW's learning rate, and in how many steps it grows to that: the loss is below 0.1 by step
70."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both [batch, length]."""


def batches(samples: int, steps: int, seed: int) -> list[Batch]:
    """A batch for each step, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (copying(samples, generator) for _ in range(steps))
    return [(tokens.to(device()), targets.to(device())) for tokens, targets in drawn]


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of step `step`, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / WARM_UP)
