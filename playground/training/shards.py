"""The data of logical ranks: each rank has the batches of several shards, each cut as for a rank of its own.

With one shard per rank it is what `playground.training.data` gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from playground.runtime import device
from playground.training.data import TEST_BATCH, Batch, EqualSteps, collate, part_of
from playground.training.loader import RankLoader
from playground.training.partition import Partition


class SideBySide(Sampler[list[int]]):
    """For each step a batch of every shard, in the order of the shards, whose samples lie one after the other."""

    def __init__(self, shards: Sequence[EqualSteps]) -> None:
        self.shards = shards

    def go_on_from(self, epochs: int, steps: int) -> None:
        """Be as after so many epochs, and so many steps of the next."""
        for shard in self.shards:
            shard.go_on_from(epochs, steps)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[list[int]]:
        firsts = list(accumulate((shard.samples for shard in self.shards[:-1]), initial=0))
        for batches in zip(*self.shards, strict=True):
            for first, positions in zip(firsts, batches, strict=True):
                yield [first + position for position in positions]


def carried_shards(shards: int) -> range:
    """The numbers of this rank's shards, where each rank carries so many of them."""
    return range(dist.get_rank() * shards, (dist.get_rank() + 1) * shards)


def partition_among_shards(
    data: Dataset[Batch], batch_size: int, seed: int, num_workers: int, shards: int
) -> DataLoader[Batch]:
    """As `partition_dataset`, for a rank that carries several shards: their batches in turn."""
    number = dist.get_world_size() * shards
    parts = [part_of(data, batch_size, seed, shard, number) for shard in carried_shards(shards)]
    carried = Partition(data, [*chain.from_iterable(partition.index for partition, _ in parts)])
    steps = SideBySide([steps for _, steps in parts])
    return RankLoader(carried, num_workers=num_workers, batch_sampler=steps, collate_fn=collate)


def shard_batches(
    train_set: DataLoader[Batch], batch_size: int, done: int, shards: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """As `batches`: of every global batch one per shard, and the size of the global batch divided by the number of all
    shards. `done` global batches are left out."""
    here, number = device(), dist.get_world_size() * shards
    samples = len(train_set.dataset.data)  # of the whole set, of which this rank has a part
    for place, (images, labels) in enumerate(train_set, done * shards):
        batch = min(batch_size, samples - place // shards * batch_size)
        yield images.to(here, non_blocking=True), labels.to(here, non_blocking=True), batch / number


def partition_test_set_among_shards(data: Dataset[Batch], shards: int) -> DataLoader[Batch]:
    """As `partition_test_set`. A batch holds samples of one shard only, so accuracy cannot depend on who carries it."""
    parts = [range(shard, len(data), dist.get_world_size() * shards) for shard in carried_shards(shards)]
    steps = [part[first : first + TEST_BATCH] for part in parts for first in range(0, len(part), TEST_BATCH)]
    return RankLoader(data, batch_sampler=steps, collate_fn=collate)
