"""Snapshots of shares, which any number of ranks can resume from: torch.distributed.checkpoint cuts them again."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from playground.lessons.zero.lesson import Zero1
from playground.measurement import Fields
from playground.runtime import device


def save(folder: Path, sync: Zero1, optimizer: torch.optim.Optimizer) -> None:
    """Each rank writes its shares of parameters and of the optimizer's state. All must call this, between two steps."""
    dcp.save(shares(sync, optimizer), checkpoint_id=folder)


def load(folder: Path, sync: Zero1, optimizer: torch.optim.Optimizer) -> None:
    """Be where the ranks were that saved this, of the same model, though there were more of them or fewer."""
    for row in sync.rows:  # a step makes the state that is read
        row.share.grad = torch.zeros_like(row.share)
    optimizer.step()
    dcp.load(shares(sync, optimizer), checkpoint_id=folder)
    optimizer.zero_grad()
    sync.after_step(last=True)


def shares(sync: Zero1, optimizer: torch.optim.Optimizer) -> Fields:
    """The memory of all shares, as parts of tensors without the zeros that make shares equal; single numbers as they
    are."""
    mesh, state = init_device_mesh(device().type, (dist.get_world_size(),)), Fields()
    for number, row in enumerate(sync.rows):
        own = max(0, min(row.share_numel, row.numel - row.rank * row.share_numel))
        for name, value in {"values": row.share.detach(), **optimizer.state[row.share]}.items():
            if value.dim():
                shape = torch.Size([row.numel])
                value = DTensor.from_local(value[:own], mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
            state[f"{number}.{name}"] = value
    return state
