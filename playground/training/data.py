"""Images and labels for the ranks, and each rank's part of them.

The files are mapped into memory, not read: all ranks of a host share one copy, however many they are.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from playground.runtime import device
from playground.training.digits import SIDE
from playground.training.partition import DataPartitioner, Partition, share, shares
from playground.training.prepare import default_data_dir, prepare
from playground.training.settings import TrainingSettings

MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's training pixels, by which every image is shifted and scaled."""
TEST_BATCH = 500
Batch = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[Batch]):
    """A split ("train" or "t10k") of MNIST or of the digits: (image [1, 28, 28] float32, label int64) each.

    Asked for many at once it gives (images [n, 1, 28, 28], labels [n]), normalised in one go. `limit` keeps the first.
    """

    def __init__(self, folder: Path, split: str, limit: int | None = None) -> None:
        images = map_idx_file(folder / f"{split}-images-idx3-ubyte", SIDE, SIDE)
        labels = map_idx_file(folder / f"{split}-labels-idx1-ubyte")
        self.images, self.labels = images.unsqueeze(1)[:limit], labels[:limit]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> Batch:
        images, labels = self.__getitems__([position])
        return images[0], labels[0]

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        wanted = torch.tensor(positions, dtype=torch.int64)
        images = self.images[wanted].float().div_(255 * STD).sub_(MEAN / STD)
        return images, self.labels[wanted].long()

    def span(self, first: int, count: int) -> Batch:
        """`count` samples in the order of the file from number `first` on; after the last comes the first again."""
        return self.__getitems__([place % len(self) for place in range(first, first + count)])


class ImagesOneByOne(Images):
    """The same, fetched as tutorials do: each sample by itself, made a picture, then transformed by torchvision."""

    __getitems__ = None  # type: ignore[assignment]

    def __init__(self, folder: Path, split: str, limit: int | None = None) -> None:
        from torchvision import transforms

        super().__init__(folder, split, limit)
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])

    def __getitem__(self, position: int) -> Batch:
        picture = Image.fromarray(self.images[position, 0].numpy())
        return self.transform(picture), self.labels[position].long()


def training_images(settings: TrainingSettings) -> Dataset[Batch]:
    """The images to train on, fetched as `settings.loader` says."""
    kind = ImagesOneByOne if settings.loader == "per-sample" else Images
    return kind(settings.folder, "train", settings.limit)


def map_idx_file(file: Path, *sample: int) -> torch.Tensor:
    """The uint8 tensor of an IDX file, [samples, *sample], mapped into memory. `prepare` has checked the file. (By
    numpy: `torch.from_file` takes no path that is not UTF-8.)"""
    header, whole = 8 + 4 * len(sample), torch.from_numpy(np.memmap(file, np.uint8, mode="c"))
    return whole[header:].view(-1, *sample)


class EqualSteps(Sampler[list[int]]):
    """Positions within a partition, reshuffled each epoch, in batches; exactly `steps` of them.

    Every rank must take the same number of steps, or the others wait forever for the missing one. So a rank whose
    share of the last global batch is nothing takes part with an empty batch.
    """

    def __init__(self, samples: int, batch_size: int, steps: int, seed: int) -> None:
        self.samples, self.batch_size, self.steps = samples, batch_size, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.first = 0

    def go_on_from(self, epochs: int, steps: int) -> None:
        """Fast-forward to this epoch and step, which another run of the same training has reached."""
        for _ in range(epochs):
            torch.randperm(self.samples, generator=self.generator)
        self.first = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples, generator=self.generator).tolist()
        first, self.first = self.first, 0
        for step in range(first, self.steps):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


def partition_dataset(
    data: Dataset[Batch] | None = None, batch_size: int = 128, seed: int = 1234, num_workers: int = 0, group: Any = None
) -> tuple[DataLoader[Batch], int]:
    """This rank's part of `data` in batches, and their size: its share of each global batch of `batch_size`.

    With 3 ranks, 128 is shared as 43 + 43 + 42. No sample is dropped or doubled. `num_workers` processes load the
    batches ahead of the rank; with 0 it does that itself. The default for `data` is MNIST's training set, or digits
    where MNIST cannot be downloaded.
    """
    if data is None:
        data = Images(prepare("auto", default_data_dir()).folder, "train")
    rank, size, samples = dist.get_rank(group), dist.get_world_size(group), len(data)
    sizes = [part / samples for part in shares(samples, batch_size, size)]
    partition = DataPartitioner(data, sizes, seed).use(rank)
    steps = EqualSteps(len(partition), share(batch_size, rank, size), math.ceil(samples / batch_size), seed + rank)
    return new_loader(partition, num_workers=num_workers, batch_sampler=steps), steps.batch_size


def new_loader(data: Dataset[Batch] | Partition, num_workers: int = 0, **options: Any) -> DataLoader[Batch]:
    """torch's DataLoader of whole batches. For a GPU they lie in pinned memory, from which it copies by itself. Workers
    are forked, as the dataset's files are mapped into memory, not pickled."""
    if num_workers:
        options |= {"multiprocessing_context": "fork", "worker_init_fn": ignore_sigterm}
    pinned = device().type == "cuda"
    return DataLoader(data, num_workers=num_workers, collate_fn=collate, pin_memory=pinned, **options)


def ignore_sigterm(worker: int) -> None:
    """A request to end is for the ranks, which need batches until they end; then their workers end too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def batches(
    train_set: DataLoader[Batch], batch_size: int, done: int = 0, group: Any = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """This rank's (images, labels, samples per rank) of every global batch, on its device. `done` of them are left out.

    The last is the size of the global batch, of which this is a part, divided by the number of ranks. So a sum of
    losses divided by it is this rank's part of the mean loss: averaged over the ranks, the mean over all samples, also
    where the parts are of different sizes, or empty.
    """
    here, size = device(), dist.get_world_size(group)
    left = len(train_set.dataset.data) - done * batch_size  # of the whole set, of which this rank has a part
    for images, labels in train_set:
        batch = min(batch_size, left)
        left -= batch
        yield images.to(here, non_blocking=True), labels.to(here, non_blocking=True), batch / size


def partition_test_set(data: Dataset[Batch]) -> DataLoader[Batch]:
    """This rank's part of the test set: every sample falls to exactly one rank, so the sum of all counts is exact."""
    part = range(dist.get_rank(), len(data), dist.get_world_size())
    return new_loader(Partition(data, part), batch_size=TEST_BATCH)


def collate(batch: Any) -> Any:
    """A list of samples as a batch (an empty one too). A batch stays as it is."""
    if not isinstance(batch, list):
        return batch
    return default_collate(batch) if batch else (torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64))
