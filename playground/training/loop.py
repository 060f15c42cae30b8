"""The general training loop: any model, any gradient synchronisation, gradients accumulated over several batches.

The lessons sgd and ddp have the tutorial's loop written out. This one takes the same steps, and the options besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from playground.runtime import device
from playground.runtime.backends import backend_of
from playground.runtime.files import sha256
from playground.survival.fingerprint import Fingerprint
from playground.training import net
from playground.training.data import (
    TEST_BATCH,
    Batch,
    EqualSteps,
    Images,
    collate,
    new_loader,
    part_of,
    training_images,
)
from playground.training.gradients import gradients
from playground.training.history import History
from playground.training.net import Net
from playground.training.partition import Partition
from playground.training.replicas import broadcast_parameters, flat
from playground.training.results import TrainingResult
from playground.training.resumable import open_run
from playground.training.settings import TrainingSettings
from playground.training.step import backward, training_step
from playground.training.sync import GradSync, build_grad_sync


class SideBySide(Sampler[list[int]]):
    """For each step a batch of every shard, in the order of the shards, whose samples lie one after the other."""

    def __init__(self, shards: Sequence[EqualSteps]) -> None:
        self.shards = shards

    def go_on_from(self, epochs: int, steps: int) -> None:
        """Fast-forward to this epoch and step."""
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
    """The numbers of this rank's shards, where each rank carries `shards` of them."""
    return range(dist.get_rank() * shards, (dist.get_rank() + 1) * shards)


def partition_among_shards(
    data: Dataset[Batch], batch_size: int, seed: int, num_workers: int, shards: int
) -> DataLoader[Batch]:
    """As `partition_dataset`, for a rank that carries several shards: their batches in turn."""
    number = dist.get_world_size() * shards
    parts = [part_of(data, batch_size, seed, shard, number) for shard in carried_shards(shards)]
    carried = Partition(data, [*chain.from_iterable(partition.index for partition, _ in parts)])
    steps = SideBySide([steps for _, steps in parts])
    return new_loader(carried, num_workers=num_workers, batch_sampler=steps)


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
    return new_loader(data, batch_sampler=steps)


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


MAY_DIFFER = ("snapshots", "epochs", "loader", "loader_workers")
"""Settings that change no number at any step."""


def train_by_hand(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    """Train as the lesson sgd does, with the gradient synchronisation that `settings` ask for."""
    return prepare_and_train(settings, sync_by_hand)


def train_with_ddp(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    """Train as the lesson ddp does, with gradients accumulated over several batches."""
    return prepare_and_train(settings, sync_with_ddp)


def sync_by_hand(model: nn.Module, settings: TrainingSettings) -> GradSync:
    broadcast_parameters(model)
    if settings.logical_ranks:
        return AverageOverShards(model, settings.shards_per_rank(dist.get_world_size()))
    return build_grad_sync(model, settings)


def sync_with_ddp(model: nn.Module, settings: TrainingSettings) -> GradSync:
    settings.check_for_ddp()
    return GradSync(DistributedDataParallel(model))


def prepare_and_train(
    settings: TrainingSettings, new_sync: Callable[[nn.Module, TrainingSettings], GradSync]
) -> TrainingResult:
    """`Net` on MNIST: prepared as in the lessons, then trained by `train`."""
    torch.manual_seed(settings.seed)
    images, shards = training_images(settings), settings.shards_per_rank(dist.get_world_size())
    train_set = partition_among_shards(images, settings.batch_size, settings.seed, settings.loader_workers, shards)
    test_set = partition_test_set_among_shards(Images(settings.folder, "t10k"), shards)
    sync = new_sync(Net().to(device(), memory_format=torch.channels_last), settings)
    return train(sync, train_set, test_set, settings)


def train(
    sync: GradSync, train_set: DataLoader[Batch], test_set: DataLoader[Batch], settings: TrainingSettings
) -> TrainingResult:
    """Train `sync.model` for `settings.epochs` epochs. Every rank returns the same.

    A rank runs forward and backward for each of its shards, of which it has one if there are no logical ranks. Raises
    `UsageError` if batches would be left over whose gradients no step takes.
    """
    settings.check_accumulation(len(train_set.dataset.data))
    torch.manual_seed(settings.seed + 1 + dist.get_rank())  # other dropout masks on every rank, the same every run
    shards = settings.shards_per_rank(dist.get_world_size())
    history = History(sync.model, train_set, test_set, shards)
    optimizer = torch.optim.SGD(sync.model.parameters(), lr=settings.lr, momentum=settings.momentum)
    run = open_run(
        settings.snapshots, partial(identify, settings, sync), sync, optimizer, history,
        partial(warm_up, optimizer, sync, train_set, shards),
    )  # fmt: skip
    batches_per_step = settings.accumulate * shards
    steps = len(train_set) // batches_per_step
    train_set.batch_sampler.go_on_from(run.position.epoch - 1, run.position.step * settings.accumulate)
    for epoch in history.epochs(settings.epochs):
        done = run.enter(epoch)
        coming = shard_batches(train_set, settings.batch_size, done * settings.accumulate, shards)
        for step in range(done + 1, steps + 1):
            batches = list(islice(coming, batches_per_step))
            run.draw_as_before()
            losses = losses_of_step(sync.model, batches, history, settings, (epoch, step))
            training_step(optimizer, losses, sync, last=step == steps)
            run.advance(step, last=step == steps)
    run.end()
    return history.result()


def losses_of_step(
    model: nn.Module,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
    history: History,
    settings: TrainingSettings,
    when: tuple[int, int],
) -> list[Callable[[], torch.Tensor]]:
    """For each of a step's `batches` a forward pass that returns its part of the mean loss over all of them.

    They are this rank's (images, labels, samples per shard), of its shards in turn; `when` is (epoch, step).
    """
    shards = carried_shards(history.shards)
    samples = sum(samples_per_shard for _, _, samples_per_shard in batches[:: len(shards)])

    def mean_loss(number: int, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if settings.logical_ranks:
            seed_shard(settings.seed, *when, shards[number])
        output = model(images)
        loss = F.nll_loss(output, labels, reduction="sum")
        history.add(loss, output, labels, number)
        return loss / samples

    return [
        partial(mean_loss, place % len(shards), images, labels) for place, (images, labels, _) in enumerate(batches)
    ]


def warm_up(optimizer: torch.optim.Optimizer, sync: GradSync, train_set: DataLoader[Batch], shards: int) -> None:
    """A backward on one sample for each shard, whose gradients are discarded."""
    images, labels = first_sample(train_set)
    backward(optimizer, shards * [lambda: F.nll_loss(sync.model(images), labels, reduction="sum")], sync)


def first_sample(train_set: DataLoader[Batch]) -> Batch:
    """A batch of one sample of this rank's, on its device; of none, if it has none."""
    partition = train_set.dataset
    images, labels = collate(partition.__getitems__([0] if len(partition) else []))
    return images.to(device()), labels.to(device())


def identify(settings: TrainingSettings, sync: GradSync) -> Fingerprint:
    """The settings that a run must share with a snapshot to resume from it."""
    same = {name: value for name, value in settings.on_all_ranks().items() if name not in MAY_DIFFER}
    return {
        **same, "averaging": type(sync.model).__name__,
        "data": sha256(settings.folder / "train-labels-idx1-ubyte"), "model": sha256(Path(net.__file__)),
    }  # fmt: skip
