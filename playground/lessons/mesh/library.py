"""The same in the library's words. Each function takes a GPT, or a part of it, and an axis of a
`DeviceMesh`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.context.lesson import position_ids, shard_sequence
from playground.lessons.mesh.lesson import AXES, Shape
from playground.lessons.pipeline.lesson import split
from playground.runtime import device

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets."""
PLAN = {
    name: ColwiseParallel()
    for name in ("attention.query", "attention.key", "attention.value", "up")
}
PLAN |= {name: RowwiseParallel() for name in ("attention.output", "down")}


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Ours: an all_reduce of each gradient over the group."""
    return DistributedDataParallel(model, device_mesh=mesh)


def apply_fsdp(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Ours: `Zero3(model)`. Gradients are added up; without the factor, they are averaged."""
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh).set_gradient_divide_factor(1.0)


def apply_pp(model: nn.Sequential, mesh: DeviceMesh) -> PipelineStage:
    """Ours: `Stage(split(model, index, stages), ranks, groups)`."""
    index, stages = mesh.get_local_rank(), mesh.size()
    layers = split(model, index, stages)
    return PipelineStage(layers, index, stages, device(), group=mesh.get_group())


def apply_tp(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Ours: `shard_gpt(model, group)`."""
    for block in model[1:-1]:
        parallelize_module(block, mesh, PLAN)
    parallelize_module(model[0], mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model[-1], mesh, {"1": ColwiseParallel(output_layouts=Replicate())})


def apply_cp(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Ours: `shard_sequence(model, group)`, a ring. Here each rank gathers all keys and values, as
    Llama 3 does."""
    shard_sequence(model, mesh.get_group())
    for block in model[1:-1]:
        block.attention.attend = partial(attend_to_all, mesh=mesh)


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Attention of this rank's queries, all [batch, heads, length / N, head width]. Backward is a
    reduce_scatter."""
    size, length = mesh.size(), mesh.size() * query.shape[2]
    positions = [position_ids(length, size, rank, zigzag=True).to(device()) for rank in range(size)]
    parts = (DTensor.from_local(each, mesh, [Shard(2)]) for each in (key, value))
    keys, values = (part.full_tensor(grad_placements=[Partial()]) for part in parts)
    seen = positions[mesh.get_local_rank()].unsqueeze(1) >= torch.cat(positions)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)


def apply_all(model: nn.Sequential, shape: Shape, loss: Loss, microbatches: int) -> Any:
    """All but DDP, as torchtitan does: a schedule, whose `step` computes gradients, and this rank's
    model."""
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=AXES)
    apply_tp(model, mesh["tp"])
    apply_cp(model, mesh["cp"])
    stage = apply_pp(model, mesh["pp"])
    apply_fsdp(stage.submod, mesh["dp", "cp"]._flatten("dp x cp"))
    return Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False), stage.submod
