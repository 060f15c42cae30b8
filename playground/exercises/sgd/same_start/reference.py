import torch.distributed as dist
from torch import nn


def same_start(rank: int, size: int, model: nn.Module) -> None:
    """Leave in the model, on every rank, the parameters and buffers that rank 0 has."""
    # write this
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)
    # until here
