"""A dataset divided among ranks, also where their number does not divide a batch.

`sgd` has the idea: equal parts, and means of means. Here every sample of a global batch is on
exactly one rank, so the ranks' parts may differ by one sample, and losses are summed.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler


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
