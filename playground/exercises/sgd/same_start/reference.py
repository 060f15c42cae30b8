import torch.distributed as dist
from torch import nn


def same_start(rank: int, size: int, model: nn.Module) -> None:
    """Leave in every rank's model the parameters and buffers of rank 0's."""
    # write this
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)
    # until here
