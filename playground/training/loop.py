"""One training loop for sgd and ddp: they differ in what happens to the gradients after backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from playground.training.data import Batch
from playground.training.replicas import largest_difference, rank_by_rank
from playground.training.settings import Settings
from playground.training.sync import Sync

TELL_EVERY = 0.2
"""Seconds between two reports of progress."""


def train(
    model: nn.Module,
    train_set: DataLoader[Batch],
    test_set: DataLoader[Batch],
    settings: Settings,
    *,
    sync: Sync | None = None,
    tell: Callable[..., None] = lambda **event: None,
) -> dict[str, Any]:
    """Train for `settings.epochs` epochs; return what each brought and how far the replicas ended up apart.

    Every rank returns the same. Without `sync`, the model itself is to keep its replicas one. `tell(epoch=…, step=…,
    steps=…)` hears of progress, `tell(finished=…)` of each epoch. Raises `ValueError` if batches would be
    left over whose gradients no step takes.
    """
    if len(train_set) % settings.accumulate:
        raise ValueError(f"accumulate {settings.accumulate} does not divide the {len(train_set)} batches of an epoch")
    sync = sync or Sync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    torch.manual_seed(settings.seed + 1 + dist.get_rank())  # other dropout masks on every rank, the same every run
    epochs = []
    for epoch in range(1, settings.epochs + 1):
        started = time.perf_counter()
        trained = train_epoch(model, train_set, optimizer, settings, sync, Progress(tell, epoch))
        seconds = time.perf_counter() - started
        epochs.append(summary(epoch, rank_by_rank(trained), rank_by_rank(test(model, test_set)), seconds))
        tell(finished=epochs[-1])
    return {"epochs": epochs, "replicas_max_difference": largest_difference(model)}


def train_epoch(
    model: nn.Module,
    train_set: DataLoader[Batch],
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    sync: Sync,
    progress: Progress,
) -> torch.Tensor:
    """One pass over this rank's part. Returns its [sum of losses, right answers (with dropout on), samples]."""
    device, size = next(model.parameters()).device, dist.get_world_size()
    left = len(train_set.dataset.data)  # the whole set, of which this rank has a part
    total = torch.zeros(3, dtype=torch.float64, device=device)
    model.train()
    for step, (images, labels) in enumerate(train_set, 1):
        images, labels = images.to(device), labels.to(device)
        if step % settings.accumulate == 1 or settings.accumulate == 1:
            batch = min(settings.batch_size * settings.accumulate, left)  # what one step of the optimizer is to see
            left -= batch
            optimizer.zero_grad()
        complete = step % settings.accumulate == 0
        with contextlib.nullcontext() if complete else sync.no_sync():
            output = model(images)
            loss = F.nll_loss(output, labels, reduction="sum")
            # The mean over the global batch is what one process would take. Averaging over ranks divides by their
            # number, so that is multiplied in here: then unequal shares weigh what they should, an empty one nothing.
            (loss * size / batch).backward()
        if complete:
            sync.after_backward()
            optimizer.step()
            sync.after_step(last=step == len(train_set))
        total += torch.stack([loss.detach(), *right_answers(output, labels)])
        progress(step, len(train_set))
    return total


@torch.no_grad()
def test(model: nn.Module, test_set: DataLoader[Batch]) -> torch.Tensor:
    """One pass over this rank's part of the test set. Returns its [right answers, samples]."""
    model = getattr(model, "module", model)  # what is wrapped: the ranks' numbers of test batches may differ
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for images, labels in test_set:
        total += torch.stack(right_answers(model(images.to(device)), labels.to(device)))
    return total


def right_answers(output: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """[how many of the samples have their label as the most likely class, how many there are]"""
    right = (output.argmax(1) == labels).sum()
    return [right, torch.full_like(right, len(labels))]


def summary(epoch: int, trained: torch.Tensor, tested: torch.Tensor, seconds: float) -> dict[str, Any]:
    """What an epoch brought, from every rank's counts. `seconds` is for training alone."""
    loss, right, samples = trained.sum(0).tolist()
    test_right, test_samples = tested.sum(0).tolist()
    return {
        "epoch": epoch,
        "loss": loss / samples,
        "loss_per_rank": [mine / many if many else None for mine, _, many in trained.tolist()],
        "train_accuracy": right / samples,
        "test_accuracy": test_right / test_samples,
        "tested": int(test_samples),
        "seconds": seconds,
        "samples_per_second": samples / seconds,
    }


class Progress:
    """Tells of steps done, but not so often that it costs anything."""

    def __init__(self, tell: Callable[..., None], epoch: int) -> None:
        self.tell, self.epoch, self.told = tell, epoch, time.monotonic()

    def __call__(self, step: int, steps: int) -> None:
        if time.monotonic() - self.told > TELL_EVERY:
            self.told = time.monotonic()
            self.tell(epoch=self.epoch, step=step, steps=steps)
