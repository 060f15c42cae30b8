"""The same training with DistributedDataParallel: wrap the model, drop `average_gradients`.

    python -m playground ddp
    python -m playground ddp --lab

At construction DDP sends rank 0's parameters to all. During backward it collects gradients in buckets, in reverse
order of the layers, and averages each bucket as soon as it is full, while backward goes on.
The lab takes DDP apart, in seconds and without training: its parts are in lab.py.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html and Li et al., 2020, arXiv 2006.15704
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from playground.runtime import device
from playground.training.data import Images, batches, partition_dataset, partition_test_set, training_images
from playground.training.history import History
from playground.training.loop import default_settings
from playground.training.net import Net
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
    model = DistributedDataParallel(model)
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
            optimizer.step()
            history.add(loss, output, labels)

    return history.result()
