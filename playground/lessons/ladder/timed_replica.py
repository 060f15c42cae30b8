"""A replica that trains on one rung of the ladder, or in DistributedDataParallel, with a clock on each part of a step.

| part     | from       | to                                                                       |
|----------|------------|--------------------------------------------------------------------------|
| forward  | zero_grad  | the loss                                                                 |
| backward | the loss   | this rank's last gradient                                                |
| exposed  | that       | the last average: packing, sending and receiving, waiting for the others |
| step     | that       | the end of the optimizer's step                                          |

What of the averaging is done before this rank's last gradient is hidden behind backward. To show how much that is, a
replica also averages gradients that are all ready at once, with no backward to hide behind.
"""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ladder.clock import Clock
from playground.lessons.ladder.settings import DDP, LadderSettings
from playground.runtime import device
from playground.training.gradients import AllReduce, trainable_parameters
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import GradSync, new_grad_sync

BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""DistributedDataParallel's option to send rank 0's buffers to all before each forward, as this version of torch calls
it."""


class TimedReplica:
    """A copy of the model `start`, with its gradient synchronisation, its optimizer and a clock."""

    def __init__(self, name: str, start: nn.Module, all_reduce: AllReduce, settings: LadderSettings) -> None:
        self.name, self.clock, self.model = name, Clock(), copy.deepcopy(start)
        for param in trainable_parameters(self.model):  # before the rung's own: hooks are called in order
            param.register_post_accumulate_grad_hook(lambda param: self.clock.take("gradient"))
        self.sync = candidate(name, self.model, all_reduce, settings.bucket_cap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.loss = 0.0
        """This rank's part of the last batch's mean loss."""

    def step(self, images: torch.Tensor, labels: torch.Tensor, samples_per_rank: float) -> list[float]:
        """Train on this rank's share of a batch. Seconds of each of `PARTS`."""

        def loss() -> torch.Tensor:
            return mean_loss_part(self.sync.model(images), labels, samples_per_rank)

        self.clock.start()
        self.loss = training_step(self.optimizer, [loss], self.sync, moment=self.clock.take).item()
        return self.clock.seconds("start", "forward", "gradient", "synced", "step")

    def average_alone(self) -> list[float]:
        """Seconds from gradients that are all ready at once to their averages.

        A step must come first: in the order of its gradients DistributedDataParallel arranges its buckets.
        """

        def ready_gradients() -> torch.Tensor:
            self.sync.model(no_images())  # without a forward before it DistributedDataParallel ignores a backward
            return ReadyGradients.apply(self.clock, *trainable_parameters(self.model))

        backward(self.optimizer, [ready_gradients], self.sync, moment=self.clock.take)
        return self.clock.seconds("start", "synced")


class ReadyGradients(torch.autograd.Function):
    """A loss whose backward computes nothing: the gradients of all parameters are ready at once, and zero.

    That moment is the clock's "start".
    """

    @staticmethod
    def forward(ctx: Any, clock: Clock, *params: torch.Tensor) -> torch.Tensor:
        ctx.clock = clock
        ctx.save_for_backward(*params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.zeros_like(param) for param in ctx.saved_tensors]
        ctx.clock.start()
        return None, *gradients


def candidate(name: str, model: nn.Module, all_reduce: AllReduce, bucket_cap: int) -> GradSync:
    """The gradient synchronisation of a rung; or DistributedDataParallel, with buckets as full as the rungs', and
    buffers left to each rank as in the rungs."""
    if name == DDP:
        return GradSync(DistributedDataParallel(model, bucket_cap_mb=bucket_cap / 2**20, **{BUFFERS: False}))
    return new_grad_sync(name, model, all_reduce, bucket_cap)


def no_images() -> torch.Tensor:
    """Two empty images, as BatchNorm wants at least two."""
    return torch.zeros(2, 1, 28, 28, device=device())
