"""A contestant on the ladder: one way to average gradients, on its own replica, with a clock on each part of a step.

| part     | from       | to                                                                      |
|----------|------------|-------------------------------------------------------------------------|
| forward  | zero_grad  | the loss                                                                |
| backward | the loss   | this rank's last gradient                                               |
| exposed  | that       | the last average: packing, sending and receiving, waiting for the others |
| step     | that       | the end of the optimizer's step                                         |

What of the averaging is done before this rank's last gradient is hidden behind backward. So that it can be told how
much that is, a climber also averages gradients that are all there at once, with no backward to hide behind.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lab.clock import Clock
from playground.runtime import device
from playground.training.gradients import ALL_REDUCES, AllReduce, learning
from playground.training.rungs import RUNGS
from playground.training.settings import Settings
from playground.training.sync import Sync

PARTS = ("forward", "backward", "exposed", "step")
"""Of a training step, in order."""
DDP = "ddp"
"""The contestant that is no rung of ours."""

BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""Its option to send rank 0's buffers to all before each forward, as this version of torch calls it."""


@dataclass
class Messages:
    """What a rank sends in a step, in elements of gradients."""

    lengths: list[int]
    """Of each message."""
    early: int
    """Of all that leave before the last gradient is there: no more can be hidden."""


class Climber:
    """A replica of `start` with its way of averaging and its optimizer."""

    def __init__(self, way: str, start: nn.Module, settings: Settings) -> None:
        self.way, self.clock = way, Clock()
        self.messages = messages(way, start, settings)
        self.model = copy.deepcopy(start)
        self.last_gradient = self.given = self.clock.now()
        for param in learning(self.model):  # before the rung's own: hooks are called in the order in which they came
            param.register_post_accumulate_grad_hook(self.note)
        self.sync = averaging(way, self.model, ALL_REDUCES[settings.all_reduce], settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.loss = 0.0

    def note(self, param: torch.Tensor) -> None:
        self.last_gradient = self.clock.now()

    def step(self, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> list[float]:
        """Train on this rank's share of a batch. Seconds of each of `PARTS`; `loss` is its share of the mean loss."""
        started = self.clock.start()
        self.optimizer.zero_grad()
        loss = F.nll_loss(self.sync.model(images), labels, reduction="sum") / batch_size
        forward = self.clock.now()
        (loss * dist.get_world_size()).backward()
        self.sync.after_backward()
        averaged = self.clock.now()
        self.optimizer.step()
        ended = self.clock.now()
        self.loss = loss.item()
        return self.clock.seconds(started, forward, self.last_gradient, averaged, ended)

    def average(self) -> float:
        """Seconds from gradients, which are all there at once, to their averages.

        The first step must come before: in the order of its gradients DistributedDataParallel arranges its buckets.
        """
        self.optimizer.zero_grad()
        self.sync.model(no_digits())  # without a forward before it DistributedDataParallel ignores a backward
        Given.apply(self, *learning(self.model)).backward()
        self.sync.after_backward()
        [seconds] = self.clock.seconds(self.given, self.clock.now())
        return seconds


class Given(torch.autograd.Function):
    """A loss whose backward computes nothing: the gradients of all parameters are there at once, and zero."""

    @staticmethod
    def forward(ctx: Any, climber: Climber, *params: torch.Tensor) -> torch.Tensor:
        ctx.climber = climber
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.zeros_like(param) for param in learning(ctx.climber.model)]
        ctx.climber.given = ctx.climber.clock.start()
        return None, *gradients


def no_digits() -> torch.Tensor:
    """Two empty images, as BatchNorm wants at least two."""
    return torch.zeros(2, 1, 28, 28, device=device())


def all_reduce_of(way: str, settings: Settings) -> AllReduce:
    return ALL_REDUCES["backend" if way == DDP else settings.all_reduce]


def averaging(way: str, model: nn.Module, all_reduce: AllReduce, settings: Settings) -> Sync:
    """A rung; or DistributedDataParallel, with buckets as full as the rungs', and buffers left to each rank too."""
    if way == DDP:
        cap = settings.bucket_cap / 2**20
        return Sync(DistributedDataParallel(model, bucket_cap_mb=cap, **{BUFFERS: False}))
    return RUNGS[way](model, all_reduce, settings.bucket_cap)


def messages(way: str, start: nn.Module, settings: Settings) -> Messages:
    """Noted on a replica that nobody times: for DistributedDataParallel it takes a hook, which would be timed too."""
    noted, model, real = Messages([], 0), copy.deepcopy(start), all_reduce_of(way, settings)
    missing = set(learning(model))

    def noting(tensor: torch.Tensor, **how: Any) -> Any:
        noted.lengths.append(tensor.numel())
        noted.early += tensor.numel() if missing else 0
        return real(tensor, **how)

    for param in learning(model):
        param.register_post_accumulate_grad_hook(missing.discard)
    sync = averaging(way, model, noting, settings)
    if way == DDP:
        sync.model.register_comm_hook(None, lambda _, bucket: future(noting(bucket.buffer(), async_op=True)))
    for _ in range(2):  # DistributedDataParallel arranges its buckets anew after the first backward
        noted.lengths, noted.early = [], 0
        missing.update(learning(model))
        sync.model(no_digits()).sum().backward()
        sync.after_backward()
    return noted


def future(work: Any) -> Any:
    """What a communication hook returns: the promise of a tensor."""
    return work.get_future().then(lambda done: done.value()[0])
