"""The same training with DistributedDataParallel: wrap the model, drop `average_gradients`.

    python -m playground ddp
    python -m playground ddp --lab

At construction DDP sends rank 0's parameters to all. During backward it collects gradients in buckets, in reverse
order of the layers, and averages each bucket as soon as it is full, while backward goes on.
The lab takes DDP apart, in seconds and without training: ddp_lab.py and ddp_lab_inputs.py, beside this.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html and Li et al., 2020, arXiv 2006.15704
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from playground.runtime import device, report
from playground.training.data import LOADERS, Images, partition_dataset, partition_test_set
from playground.training.loop import train
from playground.training.net import Net
from playground.training.settings import Settings


def run(rank: int, size: int, settings: Settings) -> dict[str, Any]:
    """Train `Net` on this rank's part of the data; see `train` for what it returns."""
    torch.manual_seed(settings.seed)
    images = LOADERS[settings.loader](settings.folder, "train", settings.limit)
    train_set = partition_dataset(images, settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = Net().to(device(), memory_format=torch.channels_last)
    model = DistributedDataParallel(model)
    return train(model, train_set, test_set, settings, tell=report)
