import torch
import torch.distributed as dist
from torch import nn


def average(rank: int, size: int, model: nn.Module) -> None:
    """Leave in every parameter's `grad` its mean over all ranks.

    Where a rank has none (None), it counts as zeros.
    """
    # write this
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= size
    # until here
