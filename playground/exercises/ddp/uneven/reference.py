from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from average import average
from torch import nn


def uneven(
    rank: int,
    size: int,
    model: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    step: Callable[[], None],
) -> None:
    """Train until no rank has a batch left. `average` is your own.

    In each step every rank that has a batch left takes its next one, and all
    take a step with the mean of these ranks' gradients.
    batches: inputs and targets; ranks have different numbers of them.
    step(): change the parameters of `model` by their gradients.
    """
    # write this
    for number in count():
        has_batch = number < len(batches)
        active = torch.tensor(int(has_batch))
        dist.all_reduce(active)
        if not active:
            return
        model.zero_grad()
        if has_batch:
            inputs, targets = batches[number]
            F.mse_loss(model(inputs), targets).backward()
        average(rank, size, model)
        for param in model.parameters():
            param.grad *= size / active
        step()
    # until here
