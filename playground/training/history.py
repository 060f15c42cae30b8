"""The figures of a training run, counted while it goes on: loss, accuracy, speed, of all ranks together."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
from torch import nn
from torch.utils.data import DataLoader

from playground.runtime import report
from playground.training.data import Batch
from playground.training.replicas import all_gather_stacked, largest_difference
from playground.training.results import Epoch, TrainingResult

REPORT_EVERY = 0.2
"""Seconds between two reports of progress, so that they cost nothing."""


class History:
    """Counts what a training loop tells it. Between epochs it tests the model, all ranks together."""

    def __init__(self, model: nn.Module, train_set: DataLoader[Batch], test_set: DataLoader[Batch]) -> None:
        self.model, self.train_set, self.test_set = model, train_set, test_set
        self.device = next(model.parameters()).device
        self.finished: list[Epoch] = []
        self.reported = time.monotonic()

    def epochs(self, number: int) -> Iterator[int]:
        """1 … `number`: each is counted from when it is handed out until the next one is asked for."""
        self.number = number
        for epoch in range(1, number + 1):
            self.total = torch.zeros(3, dtype=torch.float64, device=self.device)
            self.steps = 0
            self.model.train()
            started = time.perf_counter()
            yield epoch
            seconds = time.perf_counter() - started
            report(phase=f"testing after epoch {epoch} of {number}")
            tested = evaluate(self.model, self.test_set)
            self.finished.append(summary(epoch, all_gather_stacked(self.total), all_gather_stacked(tested), seconds))
            report(finished=self.finished[-1])

    def add(self, loss_sum: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: the sum of its samples' losses, and which it got right."""
        self.total += torch.stack([loss_sum.detach(), *right_answers(output, labels)])
        self.steps += 1
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.reported = time.monotonic()
            phase = f"training epoch {len(self.finished) + 1} of {self.number}"
            report(phase=phase, step=self.steps, steps=len(self.train_set))

    def result(self) -> TrainingResult:
        """Everything. All ranks must call this, and get the same."""
        return TrainingResult(epochs=self.finished, replicas_max_difference=largest_difference(self.model))


@torch.no_grad()
def evaluate(model: nn.Module, test_set: DataLoader[Batch]) -> torch.Tensor:
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


def summary(epoch: int, trained: torch.Tensor, tested: torch.Tensor, seconds: float) -> Epoch:
    """What an epoch brought, from every rank's counts. `seconds` is for training alone."""
    loss, right, samples = trained.sum(0).tolist()
    test_right, test_samples = tested.sum(0).tolist()
    return Epoch(
        epoch=epoch,
        loss=loss / samples,
        loss_per_rank=[mine / many if many else None for mine, _, many in trained.tolist()],
        train_accuracy=right / samples,
        test_accuracy=test_right / test_samples,
        tested=int(test_samples),
        seconds=seconds,
        samples_per_second=samples / seconds,
    )
