"""The figures of a training run, counted while it goes on: loss, accuracy, speed, of all ranks together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
from torch import nn
from torch.utils.data import DataLoader

from playground.runtime import report
from playground.runtime.backends import backend_for
from playground.training.data import Batch
from playground.training.replicas import all_gather_stacked, find_largest_difference
from playground.training.results import Epoch, TrainingResult

REPORT_EVERY = 0.2
"""Seconds between two reports of progress, so that they cost nothing."""


class History:
    """Counts what a training loop tells it. Between epochs it tests the model, all ranks together."""

    def __init__(self, model: nn.Module, train_set: DataLoader[Batch], test_set: DataLoader[Batch]) -> None:
        self.model, self.train_set, self.test_set = model, train_set, test_set
        self.device = next(model.parameters()).device
        self.finished: list[Epoch] = []
        self.start_counting()
        self.reported = time.monotonic()

    def start_counting(self) -> None:
        """Begin an epoch at zero."""
        self.total = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.steps, self.seconds = 0, 0.0

    def now(self) -> float:
        """Seconds on this rank's clock, when its device has done all that it was given."""
        backend_for(self.device.type).synchronize(self.device)
        return time.perf_counter()

    def epochs(self, number: int) -> Iterator[int]:
        """1 … `number`: each is counted from when it is handed out until the next one is asked for."""
        self.number = number
        for epoch in range(len(self.finished) + 1, number + 1):
            self.model.train()
            self.started = self.now()
            yield epoch
            seconds = self.seconds + self.now() - self.started
            report(phase=f"testing after epoch {epoch} of {number}")
            tested = evaluate(self.model, self.test_set)
            trained = all_gather_stacked(self.total)
            self.finished.append(summary(epoch, trained, all_gather_stacked(tested), seconds))
            report(finished=self.finished[-1])
            self.start_counting()

    def add(self, loss_sum: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: the sum of its samples' losses, and which it got right."""
        self.total += torch.stack([loss_sum.detach(), *right_answers(output, labels)])
        self.steps += 1
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.reported = time.monotonic()
            phase = f"training epoch {len(self.finished) + 1} of {self.number}"
            report(phase=phase, step=self.steps, steps=len(self.train_set))

    def state(self) -> dict[str, object]:
        """The counts so far, as plain data."""
        return {
            "finished": [asdict(epoch) for epoch in self.finished], "total": self.total, "steps": self.steps,
            "seconds": self.seconds + self.now() - self.started,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there; the epochs that had been finished are reported again."""
        self.finished = [Epoch(**epoch) for epoch in state["finished"]]
        for epoch in self.finished:
            report(finished=epoch)
        self.total, self.steps, self.seconds = state["total"].to(self.device), state["steps"], state["seconds"]

    def result(self) -> TrainingResult:
        """Everything. All ranks must call this, and get the same."""
        difference, name = find_largest_difference(self.model)
        return TrainingResult(epochs=self.finished, replicas_max_difference=difference, replicas_differ_in=name)


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
