"""Synchronous SGD by hand: every rank trains on its own part of the data, and all take the same steps.

    python -m playground sgd
    python -m playground sgd -n 4 --sync overlapped --all-reduce ring

Between backward and step the gradients are averaged over the ranks, so every replica sees the gradient of the whole
global batch and all stay bit-identical, which the run proves at its end.
The command runs exactly this code. Asked for another --sync or --all-reduce, or for --accumulate, the command takes the
same steps by the general loop, playground/training/loop.py.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.runtime import device
from playground.training.data import Images, batches, partition_dataset, partition_test_set, training_images
from playground.training.history import History
from playground.training.loop import default_settings
from playground.training.net import Net
from playground.training.replicas import broadcast_parameters
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings


def run(rank: int, size: int, settings: TrainingSettings | None = None) -> TrainingResult:
    """Train `Net` on this rank's part of the data. Every rank returns the same figures."""
    settings = settings or default_settings()
    torch.manual_seed(settings.seed)
    images = training_images(settings)
    train_set, _ = partition_dataset(images, settings.batch_size, settings.seed, settings.loader_workers)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = Net().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    history = History(model, train_set, test_set)
    torch.manual_seed(settings.seed + 1 + rank)  # from here on, each rank draws different dropout masks

    for _ in history.epochs(settings.epochs):
        for images, labels, samples_per_rank in batches(train_set, settings.batch_size):
            optimizer.zero_grad()
            output = model(images)
            # A sum, and not this rank's mean: of 128 samples 3 ranks get 43, 43 and 42, all weighted equally.
            loss = F.nll_loss(output, labels, reduction="sum")
            (loss / samples_per_rank).backward()
            average_gradients(model)
            optimizer.step()
            history.add(loss, output, labels)

    return history.result()


def average_gradients(model: nn.Module) -> None:
    """Leave in every `param.grad` its mean over all ranks. All must call this: each all_reduce waits for all ranks."""
    size = dist.get_world_size()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size
