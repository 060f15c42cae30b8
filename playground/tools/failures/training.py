"""Training that goes wrong, often silently: data, random numbers, parameters and gradients."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def unused_parameters(rank: int, size: int) -> float:
    """DistributedDataParallel waits for gradients of parameters that the loss does not depend
    on."""
    model = nn.Linear(1, 1, bias=False)
    model.spare = nn.Parameter(torch.ones(1))
    replica = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        replica(torch.tensor([rank + 1.0])).backward()
    return round(model.weight.grad.item(), 4)


def unused_parameters_cured(rank: int, size: int) -> float:
    model = nn.Linear(1, 1, bias=False)
    model.spare = nn.Parameter(torch.ones(1))
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        replica(torch.tensor([rank + 1.0])).backward()
    return round(model.weight.grad.item(), 4)


def forgotten_set_epoch(rank: int, size: int) -> int:
    """The sampler is not told the epoch, and shuffles every epoch alike."""
    sampler = DistributedSampler(range(64), num_replicas=size, rank=rank)
    orders = set()
    for _ in range(3):
        orders.add(tuple(sampler))
    return len(orders)


def forgotten_set_epoch_cured(rank: int, size: int) -> int:
    sampler = DistributedSampler(range(64), num_replicas=size, rank=rank)
    orders = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    return len(orders)


def same_seed(rank: int, size: int) -> int:
    """All ranks have the same seed, so dropout draws the same mask on each."""
    torch.manual_seed(1234)
    mask = F.dropout(torch.ones(32))
    masks = [torch.empty_like(mask) for _ in range(size)]
    dist.all_gather(masks, mask)
    return len({tuple(each.tolist()) for each in masks})


def same_seed_cured(rank: int, size: int) -> int:
    torch.manual_seed(1234 + rank)
    mask = F.dropout(torch.ones(32))
    masks = [torch.empty_like(mask) for _ in range(size)]
    dist.all_gather(masks, mask)
    return len({tuple(each.tolist()) for each in masks})


def download(file: Path) -> None:
    with file.open("wb") as stream:
        for _ in range(4):  # as it comes
            stream.write(bytes(1000))
            stream.flush()
            time.sleep(0.15)


def all_download(rank: int, size: int) -> int:
    """A rank reads a file that another is still downloading."""
    file = Path("data.bin")
    time.sleep(0.1 * rank)
    if not file.exists():
        download(file)
    return len(file.read_bytes())


def all_download_cured(rank: int, size: int) -> int:
    file = Path("data.bin")
    if rank == 0:
        download(file)
    dist.barrier()
    return len(file.read_bytes())


def nan(rank: int, size: int) -> float:
    """One rank's gradient is NaN, and the sum spreads it to all of them."""
    gradient = torch.tensor([float("nan") if rank == 1 else rank + 1.0])
    dist.all_reduce(gradient)
    return gradient.item() / size


def nan_cured(rank: int, size: int) -> float:
    gradient = torch.tensor([float("nan") if rank == 1 else rank + 1.0])
    count = gradient.isfinite().float()
    gradient.nan_to_num_(0.0)
    dist.all_reduce(gradient)
    dist.all_reduce(count)
    return gradient.item() / count.item()
