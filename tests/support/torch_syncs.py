"""torch's own ways to do what ZeRO's stages do, as gradient synchronisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from playground.training.sync import GradSync
from playground.training.tiny_gpt import LR
from playground.world import device


class TorchZero1(GradSync):
    """DistributedDataParallel with torch's own ZeroRedundancyOptimizer."""

    def optimizer(self, new_optimizer: Callable[..., Any]) -> Any:
        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=LR, fused=True
        )


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def in_fsdp(model: nn.Module) -> GradSync:
    """Each child of the model as a unit."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    return GradSync(fully_shard(model, mesh=mesh))


TORCH_SYNCS: dict[str, Callable[[nn.Module], GradSync]] = {
    "torch-ddp": lambda model: GradSync(in_ddp(model)),
    "torch-zero-1": lambda model: TorchZero1(in_ddp(model)),
    "torch-fsdp": in_fsdp,
}
