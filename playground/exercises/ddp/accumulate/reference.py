import contextlib

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def accumulate(
    rank: int,
    size: int,
    model: DistributedDataParallel,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Leave in `model` the gradients of the mean squared error over all samples
    of all ranks, synchronised once. Inputs and targets: [micro-batches,
    samples, features]; there is memory for one micro-batch at a time.
    """
    # write this
    for number, (some, wanted) in enumerate(zip(inputs, targets, strict=True)):
        is_last = number == len(inputs) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(some), wanted) / len(inputs)
            loss.backward()
    # until here
