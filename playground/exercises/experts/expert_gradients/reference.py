import torch.distributed as dist
from torch import nn


def expert_gradients(
    rank: int,
    size: int,
    replicated: list[nn.Parameter],
    experts: list[nn.Parameter],
) -> None:
    """Leave in every `grad` the gradient of the mean of all ranks' losses.

    replicated: the same parameters on all ranks. experts: this rank's own;
    their gradients have come from the tokens of all ranks.
    """
    # write this
    for param in replicated:
        dist.all_reduce(param.grad)
    for param in replicated + experts:
        if param.grad is not None:
            param.grad /= size
    # until here
