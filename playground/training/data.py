"""Images and labels for the ranks, and each rank's part of them.

The files are mapped into memory, not read: all ranks of a host share one copy, however many they
are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from playground.training.digits import SIDE
from playground.training.partition import Batches, DataPartitioner, share, shares
from playground.world import device

MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's training pixels, by which every image is shifted and
scaled."""
Batch = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[Batch]):
    """A split ("train" or "t10k") of MNIST or of the digits: (image [1, 28, 28] float32, label
    int64) each.

    Asked for many at once it gives (images [n, 1, 28, 28], labels [n]), normalised in one go.
    `limit` keeps the first.
    """

    def __init__(self, folder: Path, split: str, limit: int | None = None) -> None:
        images = map_idx_file(folder / f"{split}-images-idx3-ubyte", SIDE, SIDE)
        labels = map_idx_file(folder / f"{split}-labels-idx1-ubyte")
        self.images = images.unsqueeze(1)[:limit]
        self.labels = labels[:limit]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Batch:
        images = self.images[index].float().div_(255 * STD).sub_(MEAN / STD)
        return images, self.labels[index].long()


def map_idx_file(file: Path, *sample: int) -> torch.Tensor:
    """The uint8 tensor of an IDX file, [samples, *sample], mapped into memory. `prepare` has
    checked the file."""
    header = 8 + 4 * len(sample)
    return map_file(file)[header:].view(-1, *sample)


def map_file(file: Path) -> torch.Tensor:
    """The bytes of a file, mapped into memory. (By numpy: `torch.from_file` takes no path that is
    not UTF-8.)"""
    return torch.from_numpy(np.memmap(file, np.uint8, mode="c"))


def partition_dataset(
    data: Any, batch_size: int = 128, seed: int = 1234
) -> tuple[DataLoader[Batch], int]:
    """This rank's part of `data` in batches, and their size: its share of each global batch of
    `batch_size`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [samples / len(data) for samples in shares(len(data), batch_size, size)]
    partition = DataPartitioner(data, sizes, seed).use(rank)
    bsz = share(batch_size, rank, size)
    sampler = Batches(len(partition), bsz, math.ceil(len(data) / batch_size), seed + rank)
    pinned = device().type == "cuda"  # from pinned memory a GPU copies by itself
    return DataLoader(partition, batch_size=None, sampler=sampler, pin_memory=pinned), bsz


def batches(
    train_set: DataLoader[Batch], batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """This rank's (images, labels, samples per rank) of every global batch, on its device.

    The last is the size of the global batch, of which this is a part, divided by the number of
    ranks. So a sum of losses divided by it is this rank's part of the mean loss: averaged over the
    ranks, the mean over all samples, also where the parts are of different sizes, or empty.
    """
    here, size = device(), dist.get_world_size()
    left = len(train_set.dataset.data)  # of the whole set, of which this rank has a part
    for images, labels in train_set:
        batch = min(batch_size, left)
        left -= batch
        yield images.to(here, non_blocking=True), labels.to(here, non_blocking=True), batch / size
