"""What the pipeline's exercises share: a model in stages, its batch in microbatches, and one process as the oracle."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 3


@dataclass
class Pipeline:
    """One rank's part of it."""

    stage: nn.Module
    """[samples, WIDTH] → as much."""
    inputs: torch.Tensor
    """[microbatches, samples, WIDTH]: the batch on the first rank, zeros on all others."""
    targets: torch.Tensor
    """The last rank's, zeros on all others."""
    gradients: list[torch.Tensor]
    """Those of the stage's parameters, of the mean squared error over the batch."""


def new_pipeline(rank: int, size: int, seed: int, microbatches: int) -> Pipeline:
    """One rank's part of a model that is the same on all ranks."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]
    inputs, targets = torch.randn(2, microbatches, 4, WIDTH).double()
    whole = copy.deepcopy(stages)
    F.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
    return Pipeline(
        stage=stages[rank],
        inputs=inputs if rank == 0 else torch.zeros_like(inputs),
        targets=targets if rank == size - 1 else torch.zeros_like(targets),
        gradients=[param.grad for param in whole[rank].parameters()],
    )
