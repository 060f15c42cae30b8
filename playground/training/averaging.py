"""How gradients are averaged for any model: of several dtypes, with frozen and unused parameters,
by any all-reduce, in buckets of any size.

The lesson ladder builds the same up step by step, for a model without these; a test holds both
equal. Source: Li et al., PyTorch Distributed, 2020, arXiv 2006.15704, section 3.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

BUCKET_CAP = 25 * 2**20
"""Bytes after which a bucket of gradients is full; DistributedDataParallel's default too."""
AllReduceCall = Callable[..., object]
"""Called as `all_reduce(tensor, op=…)`, in place; with `async_op=True` it returns at once something
to `wait()` for."""


def per_parameter(model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce) -> None:
    """One all_reduce per parameter: `average_gradients` of the lesson sgd.

    Raises `ValueError` for a parameter without a gradient: the other ranks would wait for it.
    """
    for name, param in model.named_parameters():
        if param.grad is None and param.requires_grad:
            at = f"{name} has no gradient on rank {dist.get_rank()}"
            raise ValueError(f"{at}: this needs a way that is None-safe")
    none_safe(model, all_reduce)


def none_safe(model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce) -> None:
    """The same, but a gradient that is None (these samples took another branch) counts as zero."""
    for grad in gradients(model):
        all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= dist.get_world_size()


def flat(model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce) -> None:
    """One all_reduce for all gradients: many small messages take longer than a large one."""
    for grads in buckets(gradients(model)):
        average_together(grads, all_reduce)


def bucketed(
    model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce, bucket_cap: float = BUCKET_CAP
) -> None:
    """One all_reduce per bucket, the last layers' first: the copy to be sent is no larger."""
    for grads in buckets(gradients(model)[::-1], bucket_cap):
        average_together(grads, all_reduce)


def average_together(grads: Sequence[torch.Tensor], all_reduce: AllReduceCall) -> None:
    """Leave in every tensor its mean over all ranks. They are of one type: one message."""
    message = torch.cat([grad.flatten() for grad in grads])
    all_reduce(message, op=dist.ReduceOp.SUM)
    message /= dist.get_world_size()
    averaged = message.split([grad.numel() for grad in grads])
    for grad, mean in zip(grads, averaged, strict=True):
        grad.copy_(mean.view_as(grad))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that backward computes gradients for, in the order of the layers."""
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every trainable parameter, zero where this rank has none."""
    params = trainable_parameters(model)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params]


def buckets(
    tensors: Iterable[torch.Tensor], cap: float = float("inf")
) -> Iterator[list[torch.Tensor]]:
    """Tensors of one type that travel together: a bucket is full when it has `cap` bytes."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= cap:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()


class Bucket:
    """Gradients in the memory of their message: each `param.grad` is a view of it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.flat = params[0].detach().new_zeros(sum(param.numel() for param in params))
        self.weight = 1 / dist.get_world_size()
        self.views = views_of(self.flat, params)
        self.missing = set(params)  # those whose gradients are not in the bucket yet

    def add(self, param: torch.Tensor) -> None:
        """Put this rank's gradient of `param` into the bucket, as its part of the mean."""
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is view:  # backward has added to what was there: nothing to copy
            view *= self.weight
        else:
            torch.mul(param.grad, self.weight, out=view)
        param.grad = view
        self.missing.remove(param)


def views_of(
    flat: torch.Tensor, params: Sequence[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter its part of a flat tensor, with the parameter's shape and strides."""
    parts = flat.split([param.numel() for param in params])
    return {
        param: part.as_strided(param.shape, torch.empty_like(param).stride())
        for param, part in zip(params, parts, strict=True)
    }
