import torch
import torch.distributed as dist
import torch.nn.functional as F
from average import average
from torch import nn

PADDING = -100


def token_loss(
    rank: int,
    size: int,
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Leave in `model`, on every rank, the gradients of the mean cross-entropy
    over all tokens of all ranks. `average` is your own.

    inputs: [samples, length, features]; the model's output: [samples, length,
    classes].
    labels: [samples, length], classes; PADDING where there is no token.
    """
    # write this
    tokens = (labels != PADDING).sum()
    dist.all_reduce(tokens)
    loss = F.cross_entropy(
        model(inputs).flatten(0, 1),
        labels.flatten(),
        ignore_index=PADDING,
        reduction="sum",
    )
    (loss * size / tokens).backward()
    average(rank, size, model)
    # until here
