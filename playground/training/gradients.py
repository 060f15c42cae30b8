"""Averaging over ranks, naive first, faster next to it.

Every variant leaves in each `param.grad` the mean over all ranks of what the ranks had there. A rank without a
gradient for a parameter (a branch of the model its samples did not take) counts as zero, and takes part all the
same: if it skipped the call, the others would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms import ALGORITHMS

AllReduce = Callable[..., object]
"""Called as `all_reduce(tensor, op=…)`, in place."""


def average_gradients(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce a parameter, as the tutorial does it."""
    size = dist.get_world_size()
    for grad in gradients(model):
        all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= size


def average_gradients_flat(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce for all: a message has a cost of its own, so eight small ones cost more than one of their sum.

    Gradients may have several types; those of one type travel together.
    """
    size = dist.get_world_size()
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in gradients(model):
        by_type.setdefault(grad.dtype, []).append(grad)
    for grads in by_type.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        all_reduce(flat, op=dist.ReduceOp.SUM)
        flat /= size
        for grad, averaged in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(averaged.view_as(grad))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every parameter that learns, zero where this rank has none."""
    learning = [param for param in model.parameters() if param.requires_grad]
    for param in learning:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in learning if param.grad is not None]


def broadcast_parameters(model: nn.Module, src: int = 0) -> None:
    """Every rank starts from the parameters and buffers of `src`."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            whole = tensor.contiguous()
            dist.broadcast(whole, src)
            tensor.copy_(whole)


def largest_difference(model: nn.Module) -> float:
    """The largest difference of any parameter between a rank and rank 0; NaN if only one of the two is NaN.

    Replicas that took the same steps are bit-identical, and it is exactly 0.0 (also where training diverged: the same
    NaN on all ranks is no difference).
    """
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    root = mine.clone()
    dist.broadcast(root, src=0)
    same_bits = (mine.view(torch.uint8) == root.view(torch.uint8)).view(len(mine), -1).all(dim=1)
    difference = (mine - root).abs().masked_fill(same_bits, 0).max()
    everybodys = [torch.zeros_like(difference) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, difference)
    return torch.stack(everybodys).max().item()


AVERAGING: dict[str, Callable[..., None]] = {
    "per-parameter": average_gradients,
    "flat": average_gradients_flat,
}
"""What `sgd --sync` offers."""

ALL_REDUCES: dict[str, AllReduce] = {"backend": dist.all_reduce, **ALGORITHMS}
"""What `sgd --all-reduce` offers: the backend's own and ours."""
