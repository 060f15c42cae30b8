"""Synchronous SGD by hand: every rank trains on its own part of the data, and all take the same steps.

    python -m playground sgd
    python -m playground sgd -n 4 --sync per-parameter --all-reduce ring --epochs 2

Between backward and step the gradients are averaged over the ranks, so every replica sees the gradient of the whole
global batch and all stay bit-identical, which the run proves at its end.
The ways to average, naive first: playground/training/gradients.py and, for the last one, overlap.py beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from playground.runtime import device, report
from playground.training.data import LOADERS, Images, partition_dataset, partition_test_set
from playground.training.loop import train
from playground.training.net import Net
from playground.training.replicas import broadcast_parameters
from playground.training.settings import Settings, synchronised


def run(rank: int, size: int, settings: Settings) -> dict[str, Any]:
    """Train `Net` on this rank's part of the data; see `train` for what it returns."""
    torch.manual_seed(settings.seed)
    images = LOADERS[settings.loader](settings.folder, "train", settings.limit)
    train_set = partition_dataset(images, settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = Net().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(model)
    return train(model, train_set, test_set, settings, tell=report, sync=synchronised(model, settings))
