"""Replicas of one model: made equal before training, compared after it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from playground.world.rendezvous.agreement import require_same_on_all_ranks

SMALLEST = 5e-324
"""The smallest float64 above 0."""


def broadcast_parameters(model: nn.Module, src: int = 0) -> None:
    """Every rank starts from the parameters and buffers of `src`. Raises `UsageError` on all ranks
    if a rank's model has other shapes: it would deadlock, or train on garbage."""
    named = model.state_dict().items()
    shapes = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in named}
    require_same_on_all_ranks(shapes)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            whole = tensor.contiguous()
            dist.broadcast(whole, src)
            tensor.copy_(whole)


@torch.no_grad()
def find_largest_difference(model: nn.Module, *, with_buffers: bool = True) -> tuple[float, str]:
    """The largest difference of any parameter or buffer between a rank and rank 0 (NaN if only one
    of the two is NaN), and the name of the one it is found in; "" if there is none.

    Without buffers where each rank keeps its own: the statistics of BatchNorm, if nothing
    synchronises them.

    Replicas that took the same steps are bit-identical, and it is exactly 0.0 (also where training
    diverged: the same NaN on all ranks is no difference), and only then.
    """
    tensors = dict(chain(model.named_parameters(), model.named_buffers() if with_buffers else ()))
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    mine = [difference_to_rank_0(tensors[name].flatten()) for name in names]
    largest = all_gather_stacked(torch.stack(mine)).amax(0) if mine else torch.zeros(1)
    where = int(largest.argmax())
    return largest[where].item(), names[where] if largest[where] != 0 else ""


def difference_to_rank_0(mine: torch.Tensor) -> torch.Tensor:
    """The largest difference of an element [elements], in float64."""
    root = mine.clone()
    dist.broadcast(root, src=0)
    same_bits = (mine.view(torch.uint8) == root.view(torch.uint8)).view(len(mine), -1).all(dim=1)
    if not (mine.is_floating_point() or mine.is_complex()):
        mine, root = mine.long(), root.long()
    largest = (mine - root).abs().masked_fill(same_bits, 0).max().double()
    # 0.0 and -0.0 are not the same bits
    return largest if same_bits.all() else largest.clamp(min=SMALLEST)


def max_abs_diff(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two elements; infinite where one of them is not a finite number."""
    return (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All their elements in one vector, [elements]."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def all_gather_stacked(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor`, of one shape on all: [rank, …]. All must call this."""
    tensor = tensor.contiguous()  # nccl takes no other
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows)
