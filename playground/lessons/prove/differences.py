"""How far models are from each other: their numbers as one vector, and the largest difference on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.prove.page import MaxAbs
from playground.runtime import device
from playground.training.replicas import flat


def max_abs(model: nn.Module) -> MaxAbs:
    """How large the model's gradients and parameters are, on this rank."""
    return MaxAbs(gradients=max_abs_diff(gradients(model)), parameters=max_abs_diff(parameters(model)))


def max_abs_difference(model: nn.Module, other: nn.Module) -> MaxAbs:
    """How far the two models' gradients and parameters differ, on this rank."""
    return MaxAbs(
        gradients=max_abs_diff(gradients(model), gradients(other)),
        parameters=max_abs_diff(parameters(model), parameters(other)),
    )


def parameters(model: nn.Module) -> torch.Tensor:
    """All parameters, flattened into one vector, [elements]."""
    return flat(model.parameters())


def gradients(model: nn.Module) -> torch.Tensor:
    """The gradients of the last step, flattened into one vector, [elements]."""
    return flat(param.grad for param in model.parameters() if param.grad is not None)


def running_stats(model: nn.Module) -> torch.Tensor:
    """The running means and variances of all BatchNorms, flattened into one vector, [elements]."""
    return flat(buffer for buffer in model.buffers() if buffer.is_floating_point())


def max_abs_diff(one: torch.Tensor, other: torch.Tensor | float = 0.0) -> float:
    """The largest difference between elements; infinite where one of them is not a finite number."""
    return (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """For each of `values`, the largest that any rank has in its place. All ranks must call this."""
    largest = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return list(largest.tolist())


def largest_of_all_ranks(found: Sequence[MaxAbs]) -> list[MaxAbs]:
    """Each of `found`, as large as on any rank (None stays None). All ranks must call this."""
    largest = max_over_ranks([figure or 0.0 for each in found for figure in (each.gradients, each.parameters)])
    return [
        MaxAbs(gradients=None if mine.gradients is None else grads, parameters=params)
        for mine, grads, params in zip(found, largest[::2], largest[1::2], strict=True)
    ]


def minus_rank_0(values: torch.Tensor) -> torch.Tensor:
    """`values` less those of rank 0. All ranks must call this."""
    root = values.clone()
    dist.broadcast(root, src=0)
    return values - root
