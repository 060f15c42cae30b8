"""What is counted while a server trains, or all-reduce in its place: losses, bytes, staleness, and how it ends."""

from __future__ import annotations

import time
from collections import Counter
from math import ceil

import torch
from torch import nn

from playground.lessons.parameter_server.results import ModeResult, Point
from playground.lessons.parameter_server.settings import ServerSettings
from playground.measurement.interleave import Heartbeat
from playground.runtime import device
from playground.training.data import Images
from playground.training.replicas import flat

POINTS = 10
"""Of the curve that is shown."""
TESTED = 2_000
"""Images of the test set."""


class LossHistory:
    """Counts from its making on. `per_step`: how many times `add` is called for a step of all workers."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.started, self.samples = time.perf_counter(), 0
        self.losses: list[tuple[float, int, float]] = []
        """(seconds, samples, their summed loss) of each gradient."""

    def add(self, loss: float, samples: int) -> None:
        """A gradient of so many samples has come, whose losses sum to `loss`."""
        self.samples += samples
        self.losses.append((time.perf_counter() - self.started, samples, loss))

    @property
    def seconds(self) -> float:
        """From the making to the last gradient."""
        return self.losses[-1][0]

    def points(self) -> list[Point]:
        """The curve: as many steps from one point to the next, the last few to the last."""
        points, seen = [], 0
        stride = self.per_step * ceil(len(self.losses) / self.per_step / POINTS)
        for first in range(0, len(self.losses), stride):
            part = self.losses[first : first + stride]
            samples = sum(number for _, number, _ in part)
            seen += samples
            loss = sum(loss for *_, loss in part) / samples
            points.append(Point(samples=seen, seconds=part[-1][0], loss=loss))
        return points


class ServerHistory:
    """Counts the gradients that a server takes in one mode."""

    def __init__(self, model: nn.Module, mode: str, workers: int, settings: ServerSettings) -> None:
        self.mode, self.workers, self.settings = mode, workers, settings
        self.losses = LossHistory(per_step=workers)
        self.staleness: Counter[int] = Counter()
        self.bytes = 0
        """That the server has sent and received."""
        self.early = flat(model.parameters()).cpu()
        """The parameters after the gradients of `settings.early_steps` steps."""
        self.heartbeat = Heartbeat()

    def add(self, nbytes: int, staleness: int, loss: float, samples: int) -> None:
        """Count a gradient of so many bytes and samples, whose losses sum to `loss`."""
        self.bytes += nbytes
        self.staleness[staleness] += 1
        self.losses.add(loss, samples)
        total = self.settings.steps * self.workers
        self.heartbeat.beat(phase=f"training, {self.mode}", step=self.staleness.total(), steps=total)

    def keep_early(self, model: nn.Module) -> None:
        """After each step: keep the parameters, if it is time for that."""
        if self.staleness.total() == self.settings.early_steps * self.workers:
            self.early = flat(model.parameters()).cpu()

    def result(
        self, model: nn.Module, taken: list[int], lost: dict[int, int], early_by_all_reduce: torch.Tensor
    ) -> ModeResult:
        """What came of it.

        `taken`: the gradients of each worker; `lost`: workers that died, and how many gradients in all had been taken
        by then; `early_by_all_reduce`: the parameters after as many gradients as `early`, without a server.
        """
        return ModeResult(
            mode=self.mode, seconds=self.losses.seconds, samples=self.losses.samples, points=self.losses.points(),
            staleness=dict(sorted(self.staleness.items())), gradients_by_worker=taken,
            bytes_per_step=round(self.bytes / self.settings.steps),
            test_accuracy=test_accuracy(model, self.settings), lost_workers=lost,
            difference_to_all_reduce=(self.early - early_by_all_reduce).abs().max().item(),
        )  # fmt: skip


@torch.no_grad()
def test_accuracy(model: nn.Module, settings: ServerSettings) -> float:
    """The share of right answers for the first `TESTED` images of the test set."""
    images, labels = Images(settings.folder, "t10k", TESTED).span(0, TESTED)
    images = images.to(device(), torch.get_default_dtype())
    return (model.eval()(images).argmax(1).cpu() == labels).double().mean().item()
