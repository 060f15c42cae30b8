"""Partition, DataPartitioner: who gets which sample.

Pure Python, and the same on every rank: the indexes are shuffled once with a seed all ranks share, then cut, so every
index falls into exactly one partition without a word being exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any


class Partition:
    """The samples of `data` at `index`, as a dataset of its own."""

    def __init__(self, data: Any, index: Sequence[int]) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> Any:
        return self.data[self.index[position]]

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """A batch in one go. `DataLoader` calls this if it is there, instead of fetching sample by sample."""
        wanted = [self.index[position] for position in positions]
        fetch = getattr(self.data, "__getitems__", None)
        return fetch(wanted) if fetch else [self.data[i] for i in wanted]


class DataPartitioner:
    """Cuts a dataset into partitions of the given fractions: `DataPartitioner(data, [0.7, 0.2, 0.1]).use(0)`.

    The cuts are the rounded running sums of the fractions. So nothing is dropped and nothing doubled: fractions that
    sum to one share out every sample, where rounding each part down would lose some (3 of 60,000 for 7 ranks).

    Raises `ValueError` for fractions that are negative, not finite, or sum to more than one.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        if not all(0 <= size <= 1 for size in sizes) or math.fsum(sizes) > 1 + 1e-9:
            raise ValueError(f"partition sizes {list(sizes)} must be fractions that sum to at most 1")
        self.data = data
        index = list(range(len(data)))
        Random(seed).shuffle(index)
        cuts = [round(math.fsum(sizes[:i]) * len(index)) for i in range(len(sizes) + 1)]
        self.partitions = [index[start:stop] for start, stop in pairwise(cuts)]

    def use(self, partition: int) -> Partition:
        """The partition with that number, by convention the rank's own."""
        return Partition(self.data, self.partitions[partition])


def share(total: int, rank: int, size: int) -> int:
    """How many of `total` samples fall to `rank`: as equal as whole numbers allow, the first ranks get the rest.

    >>> [share(128, rank, 3) for rank in range(3)]
    [43, 43, 42]
    """
    return total // size + (rank < total % size)


def shares(samples: int, batch_size: int, size: int) -> list[int]:
    """How many of `samples` each rank needs so that every global batch of `batch_size` is shared out as `share` says.

    >>> shares(60_000, 128, 3)
    [20156, 20156, 19688]
    """
    batches, rest = divmod(samples, batch_size)
    return [batches * share(batch_size, rank, size) + share(rest, rank, size) for rank in range(size)]
