"""Snapshots of shards, which any number of ranks can resume from: torch.distributed.checkpoint
shards them again."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from playground.runtime import device
from playground.training.sharding import Zero1


def save(folder: Path, sync: Zero1, optimizer: torch.optim.Optimizer) -> None:
    """Each rank writes its shards of parameters and of the optimizer's state. All must call this,
    between two steps."""
    dcp.save(shards(sync, optimizer), checkpoint_id=folder)


def load(folder: Path, sync: Zero1, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state of the ranks that saved it, of the same model, whatever their number."""
    for shard in sync.shards():  # a step makes the state that is read
        shard.grad = torch.zeros_like(shard)
    optimizer.step()
    dcp.load(shards(sync, optimizer), checkpoint_id=folder)
    optimizer.zero_grad()
    sync.after_step(last=True)


def shards(sync: Zero1, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The memory of all shards, as parts of tensors without the zeros that pad them; single numbers
    as they are."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    state: dict[str, torch.Tensor] = {}
    for index, flat in enumerate(sync.flat_params):
        own = max(0, min(len(flat.shard), flat.numel - dist.get_rank() * len(flat.shard)))
        for name, value in {"values": flat.shard.detach(), **optimizer.state[flat.shard]}.items():
            if value.dim():
                shape = torch.Size([flat.numel])
                value = DTensor.from_local(
                    value[:own], mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,)
                )
            state[f"{index}.{name}"] = value
    return state
