import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LR = 0.1


def judge(
    rank: int,
    size: int,
    model: nn.Module,
    step: Callable[[nn.Module, torch.Tensor, torch.Tensor], None],
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> bool:
    """Whether `step` trains `model` as one process would, except for rounding.
    All ranks return the same.

    step(model, inputs, targets): one step of SGD on this rank's part of a
    batch, together with all other ranks.
    inputs, targets: [steps, samples, features], whole batches; rank r's part of
    one is `batch.tensor_split(size)[r]`.
    One process: SGD with rate LR on `F.mse_loss` of the whole batch. At first
    all ranks have the same model.
    """
    # write this
    alone, is_right = copy.deepcopy(model), True
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for batch, wanted in zip(inputs, targets, strict=True):
        parts = (each.tensor_split(size)[rank] for each in (batch, wanted))
        step(model, *parts)
        optimizer.zero_grad()
        F.mse_loss(alone(batch), wanted).backward()
        optimizer.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        for mine, due in pairs:
            is_right = is_right and torch.allclose(mine, due)
    wrong_ranks = torch.tensor(int(not is_right))
    dist.all_reduce(wrong_ranks)
    return not wrong_ranks
    # until here
