"""The general training loop: any model, any gradient synchronisation, gradients accumulated over
several batches.

The board of elastic has the tutorial's loop written out, and `run_board` runs it. The loop here
takes the same steps, and the options besides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from playground.checkpoint.snapshots import Fingerprint
from playground.lessons.mnist import Net
from playground.runtime import device, host, on_device
from playground.runtime.files import sha256
from playground.runtime.remote import Remote
from playground.runtime.rendezvous.agreement import require_same_on_all_ranks
from playground.training.data import (
    Batch,
    Images,
    batches,
    partition_dataset,
    partition_test_set,
)
from playground.training.history import BoardWatch, History, result_of
from playground.training.results import TrainingResult
from playground.training.resumable import ResumableRun
from playground.training.settings import TrainingSettings
from playground.training.step import backward, training_step
from playground.training.sync import GradSync

MAY_DIFFER = ("snapshots", "epochs")
"""Settings that change no number at any step."""


def run_training(
    rank: int, size: int, lesson: Remote, settings: Any, more: tuple[Any, ...] = ()
) -> Any:
    """The result of `lesson(rank, size, settings, *more)`. Ranks agree on their settings, and each
    keeps to its place. Raises `UsageError` if the ranks were not all given the same settings."""
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    return lesson(rank, size, settings, *more)


def run_board(
    rank: int, size: int, settings: TrainingSettings, board: Callable[..., nn.Module]
) -> TrainingResult:
    """Train as a board's `run` does, with what `settings` ask for, and watch it from outside. Every
    rank returns the same."""
    images = Images(settings.folder, "train", settings.limit)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    watch = BoardWatch(test_set, settings.epochs)
    with on_device():
        model = board(
            rank, size, images, batch_size=settings.batch_size, epochs=settings.epochs,
            lr=settings.lr, momentum=settings.momentum, seed=settings.seed, loader=watch.new_loader,
            after_epoch=watch.after_epoch,
        )  # fmt: skip
    return result_of(model, watch.finished)


def train_with_ddp(rank: int, size: int, settings: TrainingSettings) -> TrainingResult:
    """Train `Net` with DistributedDataParallel, as `settings` ask for: with gradients accumulated
    over several batches, and with snapshots."""
    return prepare_and_train(settings, sync_with_ddp)


def sync_with_ddp(model: nn.Module, settings: TrainingSettings) -> GradSync:
    return GradSync(DistributedDataParallel(model))


def prepare_and_train(
    settings: TrainingSettings, new_sync: Callable[[nn.Module, TrainingSettings], GradSync],
    after_step: Callable[[int], object] = lambda step: None,
) -> TrainingResult:  # fmt: skip
    """`Net` on MNIST: prepared as in the lessons, then trained by `train`."""
    torch.manual_seed(settings.seed)
    images = Images(settings.folder, "train", settings.limit)
    train_set, _ = partition_dataset(images, settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = Net().to(device(), memory_format=torch.channels_last)
    return train(new_sync(model, settings), train_set, test_set, settings, after_step)


def sum_of_losses(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(model(images), labels, reduction="sum")


def train(
    sync: GradSync, train_set: DataLoader[Batch], test_set: DataLoader[Batch],
    settings: TrainingSettings,
    after_step: Callable[[int], object] = lambda step: None,
) -> TrainingResult:  # fmt: skip
    """Train `sync.model` for `settings.epochs` epochs, and call `after_step` with the number of
    steps taken, before a snapshot. Every rank returns the same.

    Raises `UsageError` if batches would be left over whose gradients no step takes.
    """
    settings.check_accumulation(len(train_set.dataset.data))
    # other dropout masks on every rank, the same every run
    torch.manual_seed(settings.seed + 1 + dist.get_rank())
    history = History(sync.model, train_set, test_set)
    optimizer = sync.optimizer(partial(torch.optim.SGD, lr=settings.lr, momentum=settings.momentum))
    run = ResumableRun(
        settings.snapshots, partial(identify, settings, sync), sync, optimizer, history,
        partial(warm_up, optimizer, sync, train_set),
    )  # fmt: skip
    steps = len(train_set) // settings.accumulate
    train_set.sampler.go_on_from(run.position.epoch - 1, run.position.step * settings.accumulate)
    for epoch in history.epochs(settings.epochs):
        done = run.enter(epoch)
        coming = batches(train_set, settings.batch_size, done * settings.accumulate)
        for step in range(done + 1, steps + 1):
            taken = list(islice(coming, settings.accumulate))
            run.draw_as_before()
            training_step(
                optimizer, losses_of_step(sync.model, taken, history), sync, last=step == steps
            )
            after_step(run.position.total + 1)
            run.advance(step, last=step == steps)
    run.end()
    return history.result()


def losses_of_step(
    model: nn.Module, taken: Sequence[tuple[torch.Tensor, torch.Tensor, float]], history: History
) -> list[Callable[[], torch.Tensor]]:
    """For each batch that a step has `taken`, this rank's (images, labels, samples per rank), a
    forward pass that returns its part of the mean loss over all of them."""
    samples = sum(samples_per_rank for _, _, samples_per_rank in taken)

    def mean_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = model(images)
        loss = F.nll_loss(output, labels, reduction="sum")
        history.add(loss, output, labels)
        return loss / samples

    return [partial(mean_loss, images, labels) for images, labels, _ in taken]


def warm_up(optimizer: torch.optim.Optimizer, sync: GradSync, train_set: DataLoader[Batch]) -> None:
    """A backward on a sample of this rank's, on none if it has none, whose gradients are
    discarded."""
    partition = train_set.dataset
    images, labels = (tensor.to(device()) for tensor in partition[[0] if len(partition) else []])
    backward(optimizer, [partial(sum_of_losses, sync.model, images, labels)], sync)


def identify(settings: TrainingSettings, sync: GradSync) -> Fingerprint:
    """The settings that a run must share with a snapshot to resume from it."""
    same = {
        name: value for name, value in settings.on_all_ranks().items() if name not in MAY_DIFFER
    }
    return {
        **same, "averaging": type(sync.model).__name__,
        "data": sha256(settings.folder / "train-labels-idx1-ubyte"),
        "model": inspect.getsource(Net),
    }  # fmt: skip
