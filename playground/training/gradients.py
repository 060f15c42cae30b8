"""Averaging gradients after backward, four ways: from the tutorial's loop to buckets, for any all-reduce.

Each is called after backward, with this rank's gradients in every `param.grad`, and leaves there their mean over all
ranks. All ranks must call it: every all_reduce in here waits for all of them. (Ways that need more than one moment of a
step, or process groups: hierarchical.py, overlap.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from playground.training.settings import BUCKET_CAP

AllReduce = Callable[..., object]
"""Called as `all_reduce(tensor, op=…)`, in place; with `async_op=True` it returns at once something to `wait()` for."""


def average_gradients_per_parameter(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce per parameter, as the tutorial does it.

    Raises `ValueError` where a parameter has no gradient: skipping it here would leave the other ranks waiting, or, on
    all ranks, hide that it is not trained. Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    """
    size = dist.get_world_size()
    for name, param in model.named_parameters():
        if param.grad is None and param.requires_grad:
            raise ValueError(f"{name} has no gradient on rank {dist.get_rank()}: this needs a way that is None-safe")
        if param.grad is not None:
            all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= size


def average_gradients_none_safe(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """The same, but a gradient that is None (this rank's samples took another branch) takes part, as zero."""
    size = dist.get_world_size()
    for grad in gradients(model):
        all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= size


def average_gradients_flat(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce for all gradients: each message has a latency, so eight small ones take longer than one of the
    same bytes."""
    for grads in buckets(gradients(model)):
        average_together(grads, all_reduce)


def average_gradients_bucketed(
    model: nn.Module, all_reduce: AllReduce = dist.all_reduce, bucket_cap: int = BUCKET_CAP
) -> None:
    """One all_reduce per bucket, the last layers' first: the copy to be sent takes the memory of one bucket, not of all
    gradients."""
    for grads in buckets(gradients(model)[::-1], bucket_cap):
        average_together(grads, all_reduce)


def average_together(grads: Sequence[torch.Tensor], all_reduce: AllReduce) -> None:
    """Leave in every tensor its mean over all ranks. They are of one type, and travel in a single message."""
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for grad, averaged in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(averaged.view_as(grad))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that backward computes gradients for, in the order of the layers."""
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every trainable parameter, zero where this rank has none."""
    params = trainable_parameters(model)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params if param.grad is not None]


def buckets(tensors: Sequence[torch.Tensor], cap: float = float("inf")) -> Iterator[list[torch.Tensor]]:
    """Cut a sequence of tensors into those that travel together: a bucket is full once it holds `cap` bytes or more.

    Every type has buckets of its own, since a message has one type.
    """
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= cap:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()
