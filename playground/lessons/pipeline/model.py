"""The model, made of equal blocks so that it can be cut into stages that take equally long."""

from __future__ import annotations

import torch
from torch import nn

CLASSES = 10


class Block(nn.Module):
    """[samples, width] → [samples, width]. Weights are drawn as He et al. (2015) do for ReLU, so that what goes in and
    what comes out are of one size, however many blocks there are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.kaiming_uniform_(self.linear.weight, nonlinearity="relu")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(features))


def new_model(blocks: int, width: int, seed: int) -> nn.Sequential:
    """Equal blocks, and a last layer of 10 logits, which is small beside them. The same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, CLASSES))


def cut(model: nn.Sequential, stage: int, stages: int) -> nn.Sequential:
    """The layers of one stage: an equal part of the blocks, the last stage with the logits. They are the model's own.

    The number of blocks must be a multiple of `stages`.
    """
    blocks = len(model) - 1
    each = blocks // stages
    return model[stage * each : (stage + 1) * each + (stage == stages - 1)]
