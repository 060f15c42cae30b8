"""The general training loop: any model, any gradient synchronisation, gradients accumulated over several batches.

The lessons sgd and ddp have the tutorial's loop written out. This one takes the same steps, and the options besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from playground.runtime import device
from playground.training import net
from playground.training.data import Batch, Images, collate, training_images
from playground.training.files import sha256
from playground.training.history import History
from playground.training.logical_ranks import AverageOverShards, seed_shard
from playground.training.net import Net
from playground.training.replicas import broadcast_parameters
from playground.training.results import TrainingResult
from playground.training.resumable import open_run
from playground.training.settings import TrainingSettings
from playground.training.shards import (
    carried_shards,
    partition_among_shards,
    partition_test_set_among_shards,
    shard_batches,
)
from playground.training.snapshots.fingerprint import Fingerprint
from playground.training.step import backward, training_step
from playground.training.sync import GradSync, build_grad_sync

MAY_DIFFER = ("snapshots", "epochs", "loader", "loader_workers")
"""Settings that change no number at any step."""


def train_by_hand(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    """What the lesson sgd does, with the gradient synchronisation that `settings` ask for."""
    return prepare_and_train(settings, sync_by_hand)


def train_with_ddp(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    """What the lesson ddp does, with gradients accumulated over several batches."""
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
    """A backward on one sample for each shard, whose gradients nobody uses."""
    images, labels = first_sample(train_set)
    backward(optimizer, shards * [lambda: F.nll_loss(sync.model(images), labels, reduction="sum")], sync)


def first_sample(train_set: DataLoader[Batch]) -> Batch:
    """A batch of one sample of this rank's, on its device; of none, if it has none."""
    partition = train_set.dataset
    images, labels = collate(partition.__getitems__([0] if len(partition) else []))
    return images.to(device()), labels.to(device())


def identify(settings: TrainingSettings, sync: GradSync) -> Fingerprint:
    """What a run must have in common with a snapshot to go on from it."""
    same = {name: value for name, value in settings.on_all_ranks().items() if name not in MAY_DIFFER}
    return {
        **same, "averaging": type(sync.model).__name__,
        "data": sha256(settings.folder / "train-labels-idx1-ubyte"), "model": sha256(Path(net.__file__)),
    }  # fmt: skip
