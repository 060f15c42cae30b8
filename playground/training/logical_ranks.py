"""Logical ranks: training whose bits do not depend on how many processes carry it.

V logical ranks are V fixed shards of the data. Each of N processes carries V / N of them, one after the other: rank r
carries shards r·V/N … (r + 1)·V/N - 1. N may be any divisor of V, and another one after each restart. What makes the
bits equal:

- A shard's batches are those of a rank in a world of V: their samples and their shapes, so the kernels too, do not
  depend on N. Each rank computes on one thread, since more would add in another order.
- Each forward pass draws random numbers that follow from (seed, epoch, step, shard), whoever runs it.
- The V gradients are added along one fixed binary tree, whoever holds its leaves: see `sum_of_shards`.
- Losses and right answers are counted for each shard, and those counts added in the order of the shards.

What is outside: buffers that a forward pass updates (BatchNorm's statistics), processors or versions of torch that
differ, and on GPUs operations without a deterministic kernel (torch.use_deterministic_algorithms names them).
Source, for the idea: Li et al., EasyScale, SC'23, arXiv 2208.14228
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from playground.runtime.backends import backend_of
from playground.training.gradients import gradients
from playground.training.replicas import flat
from playground.training.sync import GradSync


class AverageOverShards(GradSync):
    """Gradients become their mean over all shards, `shards` of which each rank carries.

    In each step every rank runs forward and backward for each of its shards, in order, all but the last of them under
    `no_sync`. One flat gradient per shard is kept until they are added.
    """

    def __init__(self, model: nn.Module, shards: int) -> None:
        super().__init__(model)
        self.shards = shards
        self.gradients: dict[int, torch.Tensor] = {}
        torch.set_num_threads(1)
        backend_of().use_deterministic_kernels()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if len(self.gradients) == self.shards - 1:  # the last backward, which is not under this, has raised
            self.gradients.clear()
        try:
            yield
        except BaseException:
            self.gradients.clear()
            raise
        self.put_gradient_aside()

    def put_gradient_aside(self) -> None:
        """Keep what backward has just left in `param.grad` as the next shard's gradient."""
        shard = dist.get_rank() * self.shards + len(self.gradients)
        self.gradients[shard] = flat(gradients(self.model))
        self.model.zero_grad()

    def after_backward(self) -> None:
        self.put_gradient_aside()
        number = dist.get_world_size() * self.shards
        mean = sum_of_shards(self.gradients, 0, number, self.shards)
        if mean is None:
            mean = torch.empty_like(self.gradients.popitem()[1])
        self.gradients.clear()
        dist.broadcast(mean, src=0)
        mean /= number
        grads = gradients(self.model)
        for grad, averaged in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(averaged.view_as(grad))


def sum_of_shards(values: Mapping[int, torch.Tensor], first: int, end: int, shards: int) -> torch.Tensor | None:
    """The sum of shards `first` … `end - 1`, on the rank that carries shard `first`. Elsewhere None.

    `values` are this rank's, by shard; each rank carries `shards` of them. All ranks call this, walk the same tree, and
    send or receive where two halves meet that different ranks hold.

        6 shards: (0 + (1 + 2)) + (3 + (4 + 5))
    """
    if end - first == 1:
        return values.get(first)
    middle = (first + end) // 2
    left = sum_of_shards(values, first, middle, shards)
    right = sum_of_shards(values, middle, end, shards)
    here, there = first // shards, middle // shards
    if here != there and right is not None:
        dist.send(right, dst=here)
    if left is None:
        return None
    if here != there:
        right = torch.empty_like(left)
        dist.recv(right, src=there)
    return left + right


def seed_shard(seed: int, epoch: int, step: int, shard: int) -> None:
    """From here on, draw the random numbers of this shard in this step, the same in every process."""
    key = f"{seed} {epoch} {step} {shard}"
    torch.manual_seed(Random(key).getrandbits(63))  # seeded by the hash of a string: neighbours have nothing in common
