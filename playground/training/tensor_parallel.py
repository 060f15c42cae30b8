"""Tensor parallelism, by which the exercises on tensor are judged.

Where the ranks part, backward adds up their gradients of the common input. Where they meet, forward
adds up their outputs:

                                        forward          backward
    copy_to_region (Megatron's f)       nothing          all_reduce
    reduce_from_region (g)              all_reduce       nothing
    gather_from_sequence_region         all_gather       reduce_scatter
    reduce_scatter_to_sequence_region   reduce_scatter   all_gather

Sequence parallelism shards the tokens outside these pairs, by the last two functions instead of the
first two.
Sources: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al., 2022, 2205.05198
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Mirrored(torch.autograd.Function):
    """One collective forward and, for the gradient, its mirror image in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.mirror_image = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.mirror_image(gradient), None, None


def copy_to_region(tensor: Tensor) -> Tensor:
    """Megatron's f: from the ranks' common input to their shards of a matrix."""
    return Mirrored.apply(tensor, identity, all_reduce)


def reduce_from_region(tensor: Tensor) -> Tensor:
    """Megatron's g: from the summand that each rank has computed to the sum."""
    return Mirrored.apply(tensor, all_reduce, identity)


def gather_from_sequence_region(tensor: Tensor) -> Tensor:
    """f where tokens are sharded: [batch, length / N, width] → [batch, length, width]."""
    return Mirrored.apply(tensor, all_gather, reduce_scatter)


def reduce_scatter_to_sequence_region(tensor: Tensor) -> Tensor:
    """g where tokens are sharded: [batch, length, width] → this rank's tokens of the sum,
    [batch, length / N, width]. Raises `ValueError` for a length that N does not divide."""
    return Mirrored.apply(tensor, reduce_scatter, all_gather)


def identity(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def all_reduce(tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # autograd may still need `tensor`
    dist.all_reduce(total)
    return total


def all_gather(local: Tensor) -> Tensor:
    """Join the tokens, dimension 1, of all ranks. The collective joins dimension 0."""
    local = local.transpose(0, 1).contiguous()
    gathered = local.new_empty(dist.get_world_size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local)
    return gathered.transpose(0, 1).contiguous()


def reduce_scatter(summand: Tensor) -> Tensor:
    """This rank's tokens of the sum."""
    summand = summand.transpose(0, 1).contiguous()
    count, size = len(summand), dist.get_world_size()
    if count % size:
        raise ValueError(f"{count} tokens for {size} ranks: pad to a multiple of {size}")
    local = summand.new_empty(count // size, *summand.shape[1:])
    dist.reduce_scatter_tensor(local, summand)
    return local.transpose(0, 1).contiguous()


def shard(param: Tensor, dim: int) -> nn.Parameter:
    """This rank's shard of a parameter, one of N equal ones along `dim`. Raises `ValueError` for a
    size that N does not divide."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if param.shape[dim] % size:
        raise ValueError(
            f"{param.shape[dim]} cannot be sharded over {size} ranks: choose a divisor"
        )
    return nn.Parameter(param.detach().chunk(size, dim)[rank].clone())


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of `linear`, from all inputs. Nothing is exchanged here: the inputs have
    passed `copy_to_region`, once for all the layers that they go to."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = shard(linear.weight, 0)
        self.bias = None if linear.bias is None else shard(linear.bias, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Behind column-parallel layers: this rank has its shard of the inputs, and so a summand of
    each output. The bias is added once, after the sum."""

    def __init__(self, linear: nn.Linear, reduce: Any = reduce_from_region) -> None:
        super().__init__()
        self.reduce = reduce
        self.weight = shard(linear.weight, 1)
        self.bias = linear.bias

    def forward(self, local: Tensor) -> Tensor:
        output = self.reduce(F.linear(local, self.weight))
        return output if self.bias is None else output + self.bias
