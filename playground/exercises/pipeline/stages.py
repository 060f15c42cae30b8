"""What the pipeline's exercises share: a model in stages, its batch in microbatches, and one process as the oracle."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import gradients

WIDTH = 3


def new_pipeline(
    rank: int, size: int, seed: int, microbatches: int
) -> tuple[nn.Module, torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """One rank's part of a model that is the same on all ranks: its stage, [samples, WIDTH] → as much; inputs, zeros on
    all but the first rank, and targets, zeros on all but the last one, both [microbatches, samples, WIDTH]; and the
    gradients of the stage's parameters, of the mean squared error over the batch."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(size)]
    inputs, targets = torch.randn(2, microbatches, 4, WIDTH).double()
    whole = copy.deepcopy(stages)
    F.mse_loss(nn.Sequential(*whole)(inputs), targets).backward()
    if rank > 0:
        inputs = torch.zeros_like(inputs)
    if rank < size - 1:
        targets = torch.zeros_like(targets)
    return stages[rank], inputs, targets, gradients(whole[rank])
