import torch
from flat import flat
from torch import nn


def buckets(rank: int, size: int, model: nn.Module, cap: int) -> None:
    """Leave in every parameter's `grad` its mean over all ranks.

    There is an all_reduce for each bucket of at most `cap` elements. Where a
    rank has no gradient (None), it counts as zeros. `flat` is your own.
    """
    # write this
    bucket: list[torch.Tensor] = []
    for param in reversed([*model.parameters()]):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        held = sum(each.numel() for each in bucket)
        if bucket and held + param.numel() > cap:
            flat(rank, size, bucket)
            bucket = []
        bucket.append(param.grad)
    flat(rank, size, bucket)
    # until here
