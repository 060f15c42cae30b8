"""Synchronous SGD by hand: each rank trains on its own part of the data, all take the same steps.

    torchrun --nproc-per-node 2 lesson.py FOLDER
    python -m playground sgd
    python -m playground sgd -n 4 --sync overlapped --all-reduce ring

Between backward and step the gradients are averaged over the ranks, so every replica sees the
gradient of the whole global batch and all stay bit-identical. FOLDER holds MNIST as torchvision
stores it.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset


def load_mnist(folder: str) -> Dataset:
    """MNIST's training images, normalised, [60000, 1, 28, 28], and labels; else exits."""
    from torchvision.datasets import MNIST

    try:
        mnist = MNIST(folder)
    except RuntimeError:
        get = f"from torchvision.datasets import MNIST; MNIST({folder!r}, download=True)"
        sys.exit(f'no MNIST in {folder!r}: python -c "{get}" fetches it')
    images = mnist.data.unsqueeze(1).float().div_(255)
    return TensorDataset(images.sub_(0.1307).div_(0.3081), mnist.targets)


class Partition(Dataset):
    """The samples of `data` at `index`, as a dataset of its own."""

    def __init__(self, data: Any, index: Sequence[int]) -> None:
        self.data = data
        self.index = torch.tensor(index, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: Any) -> Any:
        """One sample or, for a list of positions, a batch of them."""
        return self.data[self.index[position]]


class DataPartitioner:
    """Cuts a dataset into fractions: `DataPartitioner(data, [0.7, 0.2, 0.1]).use(0)`.

    It cuts where their sums round to: no sample is dropped, none doubled. Raises `ValueError`
    for fractions that are negative, not finite, or sum to more than one.
    """

    def __init__(
        self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234
    ) -> None:
        if not all(0 <= size <= 1 for size in sizes) or math.fsum(sizes) > 1 + 1e-9:
            raise ValueError(
                f"partition sizes {list(sizes)} must be fractions that sum to at most 1"
            )
        self.data = data
        index = list(range(len(data)))
        Random(seed).shuffle(index)  # the same on every rank
        cuts = [round(math.fsum(sizes[:i]) * len(index)) for i in range(len(sizes) + 1)]
        self.partitions = [index[start:stop] for start, stop in pairwise(cuts)]

    def use(self, partition: int) -> Partition:
        """The partition with that index, by convention the rank's own."""
        return Partition(self.data, self.partitions[partition])


def share(total: int, rank: int, size: int) -> int:
    """How many of `total` samples are `rank`'s: of 128, 3 ranks get 43, 43 and 42."""
    return total // size + (rank < total % size)


def shares(samples: int, batch_size: int, size: int) -> list[int]:
    """How many of all samples each rank needs for its share of every global batch."""
    batches, rest = divmod(samples, batch_size)
    return [
        batches * share(batch_size, rank, size) + share(rest, rank, size) for rank in range(size)
    ]


class Batches(Sampler):
    """A rank's positions in its partition, a list a step, in another order every epoch.

    All take as many steps, or the others would wait forever for the missing one: where a rank's
    share of the last global batch is nothing, its last batch is empty.
    """

    def __init__(self, samples: int, batch_size: int, steps: int, seed: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.steps = steps
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples, generator=self.generator, device="cpu").tolist()
        for step in range(self.steps):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


def partition_dataset(
    data: Any, batch_size: int = 128, seed: int = 1234, loader: Any = DataLoader, group: Any = None
) -> tuple[DataLoader, int]:
    """This rank's part of `data` in batches, and its share of each global batch of `batch_size`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = [samples / len(data) for samples in shares(len(data), batch_size, size)]
    partition = DataPartitioner(data, sizes, seed).use(rank)
    bsz = share(batch_size, rank, size)
    steps = math.ceil(len(data) / batch_size)
    batches = Batches(len(partition), bsz, steps, seed + rank)
    return loader(partition, batch_size=None, sampler=batches), bsz


class Net(nn.Module):
    """The tutorial's network: images [batch, 1, 28, 28] → log-probabilities [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def broadcast_parameters(model: nn.Module) -> None:
    """Every rank starts from rank 0's parameters and buffers."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model: nn.Module) -> None:
    """Leave in every `param.grad` its mean over all ranks. All ranks must call this."""
    size = dist.get_world_size()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def count(loss: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A batch's [sum of losses, number of right answers, number of samples]."""
    right = (output.argmax(1) == labels).sum()
    return torch.stack([loss.detach(), right, torch.full_like(right, len(labels))])


def print_epoch(epoch: int, model: nn.Module, totals: torch.Tensor) -> None:
    """Print the mean loss of this rank's samples, as the tutorial does."""
    loss, right, samples = totals.tolist()
    print(
        f"Rank {dist.get_rank()}, epoch {epoch}: {loss / samples:.4f}, {right / samples:.2%} right"
    )


def run(
    rank: int, size: int, data: Any, batch_size: int = 128, epochs: int = 10, lr: float = 0.01,
    momentum: float = 0.5, seed: int = 1234, loader: Any = DataLoader,
    after_epoch: Callable[..., object] = print_epoch,
) -> nn.Module:  # fmt: skip
    """Train `Net` on this rank's part of `data`, and return it."""
    torch.manual_seed(seed)
    train_set, _ = partition_dataset(data, batch_size, seed, loader)
    model = Net().to(memory_format=torch.channels_last)  # the faster one for convolutions
    broadcast_parameters(model)
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
            average_gradients(model)
            optimizer.step()
            totals += count(loss, output, labels)
        after_epoch(epoch, model, totals)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = load_mnist(sys.argv[1] if sys.argv[1:] else "data")
    run(dist.get_rank(), dist.get_world_size(), data)
    dist.destroy_process_group()
