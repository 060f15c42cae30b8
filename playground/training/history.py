"""The figures of a training run, counted while it goes on: loss, accuracy, speed, of all ranks
together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

# the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader

from playground.lessons.partition import Partition, count
from playground.runtime import device, report
from playground.runtime.backends import backend_for
from playground.training.data import Batch, new_loader
from playground.training.replicas import all_gather_stacked, find_largest_difference
from playground.training.results import Epoch, TrainingResult

REPORT_EVERY = 0.2
"""Seconds between two reports of progress, so that they cost nothing."""


class Reporter:
    """Tells the launcher which step of which epoch a rank is at, now and then."""

    def __init__(self, epochs: int, steps: int) -> None:
        self.epochs = epochs
        self.steps = steps
        self.reported = time.monotonic()

    def report(self, epoch: int, step: int) -> None:
        """That step of the epoch is done."""
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.reported = time.monotonic()
            report(phase=f"training epoch {epoch} of {self.epochs}", step=step, steps=self.steps)


class History:
    """Counts what a training loop tells it. Between epochs it tests the model, all ranks
    together."""

    def __init__(
        self, model: nn.Module, train_set: DataLoader[Batch], test_set: DataLoader[Batch]
    ) -> None:
        self.model = model
        self.train_set = train_set
        self.test_set = test_set
        self.device = next(model.parameters()).device
        self.finished: list[Epoch] = []
        self.start_counting()

    def start_counting(self) -> None:
        """Begin an epoch at zero."""
        self.total = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.steps = 0
        self.seconds = 0.0

    def epochs(self, number: int) -> Iterator[int]:
        """1 … `number`: each is counted from when it is handed out until the next one is asked
        for."""
        self.reporter = Reporter(number, len(self.train_set))
        for epoch in range(len(self.finished) + 1, number + 1):
            self.model.train()
            self.started = now(self.device)
            yield epoch
            seconds = self.seconds + now(self.device) - self.started
            self.finished.append(
                finish_epoch(epoch, number, self.model, self.test_set, self.total, seconds)
            )
            self.start_counting()

    def add(self, loss_sum: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: the sum of its samples' losses, and which it got right."""
        self.total += count(loss_sum, output, labels)
        self.steps += 1
        self.reporter.report(len(self.finished) + 1, self.steps)

    def state(self) -> dict[str, object]:
        """The counts so far, as plain data."""
        return {
            "finished": [asdict(epoch) for epoch in self.finished], "total": self.total,
            "steps": self.steps,
            "seconds": self.seconds + now(self.device) - self.started,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; the epochs that had been finished are reported again."""
        self.finished = [Epoch(**epoch) for epoch in state["finished"]]
        for epoch in self.finished:
            report(finished=epoch)
        self.total = state["total"].to(self.device)
        self.steps = state["steps"]
        self.seconds = state["seconds"]

    def result(self) -> TrainingResult:
        """Everything. All ranks must call this, and get the same."""
        return result_of(self.model, self.finished)


class BoardWatch:
    """Watches the loop of a board from outside, by the batches that it fetches and by what it says
    after an epoch."""

    def __init__(self, test_set: DataLoader[Batch], epochs: int) -> None:
        self.test_set = test_set
        self.epochs = epochs
        self.device = device()
        self.finished: list[Epoch] = []

    def new_loader(self, data: Partition, **options: Any) -> BoardWatch:
        """What the board is to use in the place of torch's DataLoader."""
        self.loader = new_loader(data, **options)
        self.sampler = self.loader.sampler
        self.reporter = Reporter(self.epochs, len(self.loader))
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of an epoch, on this rank's device. The epoch has begun."""
        self.started = now(self.device)
        for step, batch in enumerate(self.loader):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            yield images, labels
            self.reporter.report(len(self.finished) + 1, step + 1)

    def after_epoch(self, epoch: int, model: nn.Module, totals: torch.Tensor) -> None:
        """The board's words: `totals` is what `count` returns, for all of the epoch's batches."""
        seconds = now(self.device) - self.started
        self.finished.append(
            finish_epoch(epoch, self.epochs, model, self.test_set, totals, seconds)
        )


def now(device: torch.device) -> float:
    """Seconds on this rank's clock, when its device has done all that it was given."""
    backend_for(device.type).synchronize(device)
    return time.perf_counter()


def finish_epoch(
    epoch: int,
    epochs: int,
    model: nn.Module,
    test_set: DataLoader[Batch],
    totals: torch.Tensor,
    seconds: float,
) -> Epoch:
    """Test the model, all ranks together, and report the results of the epoch that it was trained
    in for `seconds`."""
    report(phase=f"testing after epoch {epoch} of {epochs}")
    tested = evaluate(model, test_set)
    trained = all_gather_stacked(totals)
    finished = summary(epoch, trained, all_gather_stacked(tested), seconds)
    report(finished=finished)
    return finished


def result_of(model: nn.Module, epochs: list[Epoch]) -> TrainingResult:
    """The result of training `model` for these epochs. All ranks must call this, and get the
    same."""
    difference, name = find_largest_difference(model)
    return TrainingResult(
        epochs=epochs, replicas_max_difference=difference, replicas_differ_in=name
    )


@torch.no_grad()
def evaluate(model: nn.Module, test_set: DataLoader[Batch]) -> torch.Tensor:
    """One pass over this rank's part of the test set. Returns its [right answers, samples]."""
    # what is wrapped: the ranks' numbers of test batches may differ
    model = getattr(model, "module", model)
    here = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=here)
    model.eval()
    for images, labels in test_set:
        output, labels = model(images.to(here)), labels.to(here)
        total += count(output.new_zeros(()), output, labels)[1:]
    return total


def summary(epoch: int, trained: torch.Tensor, tested: torch.Tensor, seconds: float) -> Epoch:
    """The results of an epoch, from the counts of every rank. `seconds` is for training alone."""
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
