import torch
import torch.distributed as dist
from torch import nn


def scatter_gather(
    rank: int,
    size: int,
    module: nn.Linear,
    batch: torch.Tensor | None,
    samples: int,
) -> torch.Tensor | None:
    """The outputs for rank 0's `batch` [samples, features]; None elsewhere.

    Each rank puts its chunk of the batch, as `tensor_split` cuts it, through
    its own `module`. `batch` is None on all ranks but 0.
    """
    # write this
    if batch is None:
        length = len(torch.arange(samples).tensor_split(size)[rank])
        chunk = torch.empty(length, module.in_features)
        dist.recv(chunk, src=0)
        dist.send(module(chunk), dst=0)
        return None
    chunks = batch.tensor_split(size)
    for other in range(1, size):
        dist.send(chunks[other], dst=other)
    outputs = [module(chunks[0])]
    for other in range(1, size):
        outputs.append(torch.empty(len(chunks[other]), module.out_features))
        dist.recv(outputs[other], src=other)
    return torch.cat(outputs)
    # until here
