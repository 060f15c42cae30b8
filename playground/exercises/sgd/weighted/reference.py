import torch
import torch.distributed as dist
from average import average
from torch import nn
from torch.nn.functional import mse_loss


def weighted(
    rank: int,
    size: int,
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Leave in every `grad` that of the mean squared error of all samples.

    `inputs` [samples, features] and `targets` [samples, outputs] are what this
    rank has of them. `average` is your own.
    """
    # write this
    samples = torch.tensor(len(inputs))
    dist.all_reduce(samples)
    squares = mse_loss(model(inputs), targets, reduction="sum")
    loss = squares / targets.shape[1]
    (loss * size / samples).backward()
    average(rank, size, model)
    # until here
