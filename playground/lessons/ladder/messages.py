"""What a rank sends in a training step, counted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.ladder.settings import DDP
from playground.lessons.ladder.timed_replica import candidate, no_images
from playground.training.gradients import AllReduce, trainable_parameters
from playground.training.step import backward


@dataclass
class Messages:
    """In elements of gradients."""

    lengths: list[int]
    """Of each message."""
    early: int
    """Of all that leave before the last gradient is ready: no more can be hidden."""


def count_messages(name: str, start: nn.Module, all_reduce: AllReduce, bucket_cap: int) -> Messages:
    """Those of a rung, or of DistributedDataParallel: counted on a replica that nobody times.

    (DistributedDataParallel shows them to a communication hook only, which would be timed too.)
    """
    model = copy.deepcopy(start)
    params = trainable_parameters(model)
    counted, missing = Messages([], 0), set(params)
    original = dist.all_reduce if name == DDP else all_reduce

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        counted.lengths.append(tensor.numel())
        counted.early += tensor.numel() if missing else 0
        return original(tensor, **options)

    for param in params:
        param.register_post_accumulate_grad_hook(missing.discard)
    sync = candidate(name, model, counting, bucket_cap)
    if name == DDP:
        sync.model.register_comm_hook(None, lambda _, bucket: future_of(counting(bucket.buffer(), async_op=True)))
    optimizer = torch.optim.SGD(params)
    for _ in range(2):  # DistributedDataParallel arranges its buckets anew after the first backward
        counted.lengths, counted.early = [], 0
        missing.update(params)
        backward(optimizer, [lambda: sync.model(no_images()).sum()], sync)
    return counted


def future_of(work: Any) -> Any:
    """What a communication hook returns: the future of a tensor."""
    return work.get_future().then(lambda done: done.value()[0])
