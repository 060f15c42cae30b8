"""A model in DistributedDataParallel that takes numbered steps: the same ones, whoever takes them.

Batch `number` is the same samples in every run, and so are the dropout masks drawn for it on a rank. What differs
between two trainees then comes from what they were made with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lab.side_by_side import weighted
from playground.measure.timing import slowest, synchronise
from playground.runtime import device, report
from playground.training.data import Batch, Images
from playground.training.net import MODELS
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import Settings


def fresh(model: str, settings: Settings) -> nn.Module:
    """A model with the same parameters at every call, on this rank's device."""
    torch.manual_seed(settings.seed)
    return MODELS[model]().to(device())


class Trainee:
    """`options` are those of DistributedDataParallel."""

    def __init__(self, model: nn.Module, settings: Settings, bucket_cap_mb: float, **options: Any) -> None:
        self.settings = settings
        self.images = Images(settings.folder, "train", settings.limit)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=settings.lr, momentum=settings.momentum)

    def batch(self, number: int) -> Batch:
        """This rank's share of a batch: images [share, 1, 28, 28] in the model's type, labels [share].

        After the last sample comes the first again.
        """
        batch_size, size = self.settings.batch_size, dist.get_world_size()
        shares = [share(batch_size, rank, size) for rank in range(dist.get_rank() + 1)]
        first = number * batch_size + sum(shares[:-1])
        images, labels = self.images.__getitems__(
            [place % len(self.images) for place in range(first, first + shares[-1])]
        )
        return images.to(device(), self.params[0].dtype), labels.to(device())

    def loss(self, model: nn.Module, batch: Batch, batches: int = 1) -> torch.Tensor:
        """What this rank has to do with the mean loss over `batches` batches: the mean of all ranks' is that."""
        images, labels = batch
        samples = batches * self.settings.batch_size
        return weighted(model(images), labels, samples)

    def backward(self, number: int) -> float:
        """Leave in every `param.grad` its mean over all ranks for one batch. This rank's part of the loss."""
        report(batch=number)
        self.optimizer.zero_grad()
        self.draw_masks(number)
        loss = self.loss(self.ddp, self.batch(number))
        loss.backward()
        return float(loss.item())

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()

    def draw_masks(self, number: int) -> None:
        torch.manual_seed(self.settings.seed + 1 + dist.get_rank() + dist.get_world_size() * number)

    def exact_mean(self, number: int) -> torch.Tensor:
        """The mean over all ranks of their own gradients, flat, added up in float64."""
        self.draw_masks(number)
        module = self.ddp.module
        mean = flat(torch.autograd.grad(self.loss(module, self.batch(number)), self.params)).double()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def gradients(self) -> torch.Tensor:
        return flat(param.grad for param in self.params).double()

    def parameters(self) -> torch.Tensor:
        return flat(self.params).double()


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What is asked for."""

    settings: Settings
    model: str
    caps: list[float]
    """MiB after which a bucket is full: all are compared in `buckets`, the last holds for the other parts."""
    static_graph: bool
    gradient_as_bucket_view: bool
    hooks: list[str]
    """Keys of `comm_hooks.HOOKS`, "none" first."""
    required: list[str]
    """Those of them that must not be refused."""
    steps: int

    def trainee(self, cap: float | None = None, **options: Any) -> Trainee:
        return Trainee(fresh(self.model, self.settings), self.settings, cap or self.caps[-1], **options)


def errors(values: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    """How far `values` are from `right`: the largest difference, and the norm of all relative to that of `right`."""
    difference = values - right
    return {"max": difference.abs().max().item(), "relative": (difference.norm() / right.norm()).item()}


def medians(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of each call on its slowest rank, the median over rounds. In each round all are called in turn."""
    seconds = [[0.0] * rounds for _ in calls]
    for turn in range(rounds):
        for place in range(len(calls)):
            number = (turn + place) % len(calls)  # who comes first changes too
            dist.barrier()
            synchronise()
            started = time.perf_counter()
            calls[number]()
            synchronise()
            seconds[number][turn] = time.perf_counter() - started
    return [median(slowest(times)) for times in seconds]
