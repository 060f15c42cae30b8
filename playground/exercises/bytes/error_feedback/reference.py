from collections.abc import Callable

import torch
import torch.distributed as dist


def error_feedback(
    rank: int,
    size: int,
    gradient: torch.Tensor,
    residual: torch.Tensor,
    compress: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Average a gradient of which each rank sends a compressed form.

    Afterwards `gradient` holds the mean over all ranks of what they sent, and
    `residual` what this rank has not sent so far.
    residual: what it left out in earlier steps; zeros before the first step.
    compress(tensor): a new tensor of the same shape, which has less in it.
    """
    # write this
    gradient += residual
    compressed = compress(gradient)
    residual.copy_(gradient - compressed)
    dist.all_reduce(compressed)
    gradient.copy_(compressed / size)
    # until here
