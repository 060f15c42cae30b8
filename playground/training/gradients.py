"""average_gradients, four ways: from the tutorial's loop to buckets. (The fifth works during backward: overlap.py.)

Each is called after backward, with this rank's gradients in every `param.grad`, and leaves there their mean over all
ranks. All ranks must call it: every all_reduce in here waits for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms import ALGORITHMS

AllReduce = Callable[..., object]
"""Called as `all_reduce(tensor, op=…)`, in place; with `async_op=True` it returns at once something to `wait()` for."""

ALL_REDUCES: dict[str, AllReduce] = {"backend": dist.all_reduce, **ALGORITHMS}
"""The backend's own and ours."""
BUCKET_CAP = 25 * 2**20
"""Bytes after which a bucket is full; DistributedDataParallel's default too."""


def average_gradients(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce a parameter, as the tutorial does it.

    Raises `ValueError` where a parameter has no gradient: skipping it here would leave the other ranks waiting, or, on
    all ranks, hide that it does not learn. Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
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
    """One all_reduce for all: a message has a cost of its own, so eight small ones cost more than one of their sum."""
    for grads in buckets(gradients(model)):
        average_together(grads, all_reduce)


def average_gradients_bucketed(
    model: nn.Module, all_reduce: AllReduce = dist.all_reduce, bucket_cap: int = BUCKET_CAP
) -> None:
    """One all_reduce a bucket, last layer first: the copies that travel need memory for one bucket, not for all."""
    for grads in buckets(gradients(model)[::-1], bucket_cap):
        average_together(grads, all_reduce)


def average_together(grads: Sequence[torch.Tensor], all_reduce: AllReduce) -> None:
    """Average tensors of one type in a single message."""
    flat = torch.cat([grad.flatten() for grad in grads])
    all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for grad, averaged in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(averaged.view_as(grad))


def learning(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients, in the order of the layers."""
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every parameter that learns, zero where this rank has none."""
    params = learning(model)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params if param.grad is not None]


def buckets(tensors: Sequence[torch.Tensor], cap: float = float("inf")) -> Iterator[list[torch.Tensor]]:
    """Cut a row of tensors into runs that may travel together: a bucket is full once it holds `cap` bytes or more.

    Every type has buckets of its own, since a message has one type.
    """
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= cap:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()
