import torch
import torch.distributed as dist
from average import average
from torch import nn
from torch.nn.functional import mse_loss


def weighted(rank: int, size: int, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Leave in every parameter's `grad`, on every rank, the gradient of the mean squared error of all ranks' samples.
    `inputs` [samples, features], `targets` [samples, outputs]: those of this rank. `average` is your own."""
    # write this
    samples = torch.tensor(len(inputs))
    dist.all_reduce(samples)
    loss = mse_loss(model(inputs), targets, reduction="sum") / targets.shape[1]
    (loss * size / samples).backward()
    average(rank, size, model)
    # until here
