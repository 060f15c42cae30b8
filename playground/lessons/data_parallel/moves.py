"""What moves between devices, forward and, for gradients, back: each way is the other's mirror image.

| forward                              | backward                                          |
|--------------------------------------|---------------------------------------------------|
| `Split`: chunks to several devices   | `Join`: the chunks' gradients on one              |
| `Join`: tensors to one device        | `Split`: the gradient's chunks to where they were |
| `Broadcast`: one tensor to several   | the copies' gradients come home and are added up  |

Source: Li et al., 2020, arXiv 2006.15704, section 2; https://docs.pytorch.org/docs/stable/notes/extending.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from playground.lessons.data_parallel.memory import device_of, record_move


def copy_to(tensor: torch.Tensor, device: torch.device, part: str) -> torch.Tensor:
    """`tensor` on `device`: itself if it lies there, else a copy, on a virtual device too. Not for gradients.

    `part` of the training step is what the account of memory puts the move down to.
    """
    if device_of(tensor) == device:
        return tensor
    with record_move(part, device, tensor):
        return tensor.clone() if device.type == tensor.device.type == "cpu" else tensor.to(device)


class Split(torch.autograd.Function):
    """`tensor` cut along `dim` into `sizes`, a chunk to each of `devices`."""

    @staticmethod
    def forward(
        ctx: Any, part: str, tensor: torch.Tensor, devices: Sequence[torch.device], sizes: Sequence[int], dim: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.came_from, ctx.dim = device_of(tensor), dim
        chunks = zip(tensor.split(sizes, dim), devices, strict=True)
        return tuple(copy_to(chunk, device, part) for chunk, device in chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, Join.apply("gradients of inputs", ctx.came_from, ctx.dim, *gradients), None, None, None


class Join(torch.autograd.Function):
    """`tensors` one after another along `dim`, on `device`."""

    @staticmethod
    def forward(ctx: Any, part: str, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.came_from = [device_of(tensor) for tensor in tensors]
        ctx.sizes, ctx.dim = [tensor.shape[dim] for tensor in tensors], dim
        with record_move(part, device, *tensors):
            shape = list(tensors[0].shape)
            shape[dim] = sum(ctx.sizes)
            whole = torch.empty(shape, dtype=tensors[0].dtype, device=device)
            for chunk, tensor in zip(whole.split(ctx.sizes, dim), tensors, strict=True):
                chunk.copy_(tensor)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, *Split.apply("gradients of outputs", gradient, ctx.came_from, ctx.sizes, ctx.dim)


class Broadcast(torch.autograd.Function):
    """`tensor` on each of `devices`. On the first, where it lies, it is not copied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
        ctx.first = devices[0]
        return tensor.view_as(tensor), *(copy_to(tensor, device, "replicate") for device in devices[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *others: torch.Tensor) -> Any:
        for other in others:
            gradient = gradient + copy_to(other, ctx.first, "reduce")
        return gradient, None
