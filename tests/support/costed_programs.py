"""Small programs whose communication has a closed form. Each is called on every rank, on as many
ranks as its name allows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, WIDTH, HIDDEN, MICROBATCHES = 3, 4, 12, 24, 4
WEIGHTS = 2 * WIDTH * HIDDEN
"""Parameters of `new_model`: WIDTH and HIDDEN are divisible by 1, 2, 3 and 4."""


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def ddp(model: nn.Module) -> None:
    parallel = DistributedDataParallel(model)
    for _ in range(STEPS):
        loss = parallel(torch.ones(BATCH, WIDTH)).sum()
        loss.backward()


def flat_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def zero1(model: nn.Module) -> None:
    """Gradients are reduced to their owners after backward, parameters are gathered."""
    full = flat_of(model)
    shard = full.chunk(dist.get_world_size())[dist.get_rank()].clone()
    for _ in range(STEPS):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        gradients = torch.cat([param.grad.flatten() for param in model.parameters()])
        dist.reduce_scatter_tensor(torch.empty_like(shard), gradients)
        dist.all_gather_into_tensor(full, shard)


def zero2(model: nn.Module) -> None:
    """The gradient of each layer is reduced during backward."""
    size = dist.get_world_size()

    def reduce(param: torch.Tensor) -> None:
        assert param.grad is not None
        dist.reduce_scatter_tensor(torch.empty(param.numel() // size), param.grad.flatten())

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    full = flat_of(model)
    for _ in range(STEPS):
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        dist.all_gather_into_tensor(full, full.chunk(size)[dist.get_rank()].clone())


def zero3(model: nn.Module) -> None:
    """Each layer's parameters are gathered for forward and for backward."""
    size = dist.get_world_size()

    def gather(layer: nn.Module, *_: Any) -> None:
        full = flat_of(layer)
        dist.all_gather_into_tensor(full, full.chunk(size)[dist.get_rank()].clone())

    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(gather)
        layer.register_full_backward_pre_hook(gather)
    zero2_without_gather(model)


def zero2_without_gather(model: nn.Module) -> None:
    size = dist.get_world_size()

    def reduce(param: torch.Tensor) -> None:
        assert param.grad is not None
        dist.reduce_scatter_tensor(torch.empty(param.numel() // size), param.grad.flatten())

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    for _ in range(STEPS):
        model(torch.ones(BATCH, WIDTH)).sum().backward()


def fsdp(model: nn.Module) -> None:
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    for _ in range(STEPS):
        model(torch.ones(BATCH, WIDTH)).sum().backward()


def tensor_by_library(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _ in range(STEPS):
        model(torch.ones(BATCH, WIDTH, requires_grad=True)).sum().backward()


def pipeline(model: nn.Module) -> None:
    """GPipe: each rank is a stage, which is a layer of WIDTH x WIDTH."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    kept = []
    for _ in range(MICROBATCHES):
        given = torch.ones(BATCH, WIDTH)
        if rank > 0:
            dist.recv(given, rank - 1)
        given.requires_grad_()
        output = layer(given)
        if rank < size - 1:
            dist.send(output.detach(), rank + 1)
        kept.append((given, output))
    for given, output in kept:
        gradient = torch.ones(BATCH, WIDTH)
        if rank < size - 1:
            dist.recv(gradient, rank + 1)
        output.backward(gradient)
        if rank > 0:
            assert given.grad is not None
            dist.send(given.grad, rank - 1)
