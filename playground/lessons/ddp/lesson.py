"""The same training with DistributedDataParallel: wrap the model, drop `average_gradients`.

    torchrun --nproc-per-node 2 lesson.py FOLDER
    python -m playground ddp
    python -m playground ddp --lab

At construction DDP sends rank 0's parameters to all. During backward it collects gradients in
buckets, in reverse order of the layers, and averages each bucket as soon as it is full, while
backward goes on.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html and Li et al., 2020, arXiv 2006.15704
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from playground.lessons.mnist import Net
from playground.lessons.partition import count, load_mnist, partition_dataset, print_epoch


def run(
    rank: int, size: int, data: Any, batch_size: int = 128, epochs: int = 10, lr: float = 0.01,
    momentum: float = 0.5, seed: int = 1234, loader: Any = DataLoader,
    after_epoch: Callable[..., object] = print_epoch,
) -> nn.Module:  # fmt: skip
    """Train `Net` on this rank's part of `data`, and return it."""
    torch.manual_seed(seed)
    train_set, _ = partition_dataset(data, batch_size, seed, loader)
    model = Net().to(memory_format=torch.channels_last)  # the faster one for convolutions
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    torch.manual_seed(seed + 1 + rank)  # from here on, each rank draws different dropout masks
    for epoch in range(1, epochs + 1):
        model.train()
        totals = torch.zeros(3, dtype=torch.float64)
        for step, (images, labels) in enumerate(train_set):
            samples = min(batch_size, len(data) - step * batch_size)  # of the whole global batch
            optimizer.zero_grad()
            output = model(images)
            # A sum, and not this rank's mean: ranks may have different numbers of samples.
            loss = F.nll_loss(output, labels, reduction="sum")
            (loss / (samples / size)).backward()
            optimizer.step()
            totals += count(loss, output, labels)
        after_epoch(epoch, model, totals)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = load_mnist(sys.argv[1] if sys.argv[1:] else "data")
    run(dist.get_rank(), dist.get_world_size(), data)
    dist.destroy_process_group()
