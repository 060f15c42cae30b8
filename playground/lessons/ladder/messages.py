"""What a rank sends in a training step, counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.ladder.settings import DDP
from playground.lessons.ladder.timed_replica import candidate
from playground.training.gradients import AllReduce, trainable_parameters
from playground.training.step import training_step


@dataclass
class Messages:
    """In bytes."""

    sizes: list[int]
    """Of each message."""
    early: int
    """Of all that leave before the last gradient is ready: no more can be hidden."""


def count_messages(
    name: str, start: nn.Module, all_reduce: AllReduce, bucket_cap: int, inputs: tuple[torch.Tensor, ...]
) -> Messages:
    """Those of a rung, or of DistributedDataParallel, for this rank's share of a batch: counted on a replica that
    nobody times.

    (DistributedDataParallel shows them to a communication hook only, which would be timed too.)
    """
    model = copy.deepcopy(start)
    params = trainable_parameters(model)
    counted, missing = Messages([], 0), set(params)

    def counting(collective: Callable[..., Any], tensor: torch.Tensor, **options: Any) -> Any:
        counted.sizes.append(tensor.nbytes)
        counted.early += tensor.nbytes if missing else 0
        return collective(tensor, **options)

    for param in params:
        param.register_post_accumulate_grad_hook(missing.discard)
    sync = candidate(name, model, partial(counting, all_reduce), bucket_cap, partial(counting, dist.broadcast))
    if name == DDP:
        sync.model.register_comm_hook(
            None, lambda _, bucket: future_of(counting(dist.all_reduce, bucket.buffer(), async_op=True))
        )
    optimizer = torch.optim.SGD(params)
    for _ in range(2):  # DistributedDataParallel arranges its buckets anew after the first backward
        counted.sizes, counted.early = [], 0
        missing.update(params)
        training_step(optimizer, [lambda: sync.model(*inputs).sum()], sync)
    return counted


def future_of(work: Any) -> Any:
    """What a communication hook returns: the future of a tensor."""
    return work.get_future().then(lambda done: done.value()[0])
