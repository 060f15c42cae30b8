"""A replica that trains on one rung of the ladder, or in DistributedDataParallel, with a clock on each part of a step.

| part     | from       | to                                                                       |
|----------|------------|--------------------------------------------------------------------------|
| forward  | zero_grad  | the loss                                                                 |
| backward | the loss   | this rank's last gradient                                                |
| exposed  | that       | the last average: packing, sending and receiving, waiting for the others |
| step     | that       | the end of the optimizer's step                                          |

Where it is parameters that are averaged, after the optimizer's step, `exposed` is the time that this takes.

What of the averaging is done before this rank's last gradient is hidden behind backward. To show how much that is, a
replica also averages gradients that are all ready at once, with no backward to hide behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import torch._dynamo  # the optimizer imports it at its first step: here the fork server does, once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ladder.clock import Clock
from playground.lessons.ladder.settings import DDP
from playground.training.gradients import AllReduce, trainable_parameters
from playground.training.step import backward, mean_loss_part, training_step
from playground.training.sync import Broadcast, GradSync, new_grad_sync

BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""DistributedDataParallel's option to send rank 0's buffers to all before each forward, as this version of torch calls
it."""


NewOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossPart = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Called as `loss(output, labels, samples_per_rank)`, as `mean_loss_part` is."""


class TimedReplica:
    """A copy of the model `start`, with its gradient synchronisation, its optimizer and a clock."""

    def __init__(
        self, name: str, start: nn.Module, all_reduce: AllReduce, bucket_cap: int, new_optimizer: NewOptimizer,
        loss_part: LossPart = mean_loss_part,
    ) -> None:  # fmt: skip
        self.name, self.clock, self.model = name, Clock(), copy.deepcopy(start)
        for param in trainable_parameters(self.model):  # before the rung's own: hooks are called in order
            param.register_post_accumulate_grad_hook(self.take_gradient)
        self.sync = candidate(name, self.model, all_reduce, bucket_cap)
        self.optimizer, self.loss_part = new_optimizer(self.model.parameters()), loss_part
        self.loss = 0.0
        """This rank's part of the last batch's mean loss."""
        self.inputs: tuple[torch.Tensor, ...] = ()
        """Of the last batch, the first samples."""
        self.sparse: dict[torch.Tensor, torch.Tensor] = {}
        """The last gradients of the parameters for which backward computes sparse ones."""

    def take_gradient(self, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        self.clock.take("gradient")
        if param.grad is not None and param.grad.is_sparse:
            self.sparse[param] = param.grad

    def step(self, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor, samples_per_rank: float) -> list[float]:
        """Train on this rank's share of a batch: the model is called with `*inputs`. Seconds of each of `PARTS`."""

        def loss() -> torch.Tensor:
            return self.loss_part(self.sync.model(*inputs), labels, samples_per_rank)

        self.inputs = tuple(each[:2] for each in inputs)  # BatchNorm wants two
        self.clock.start()
        self.loss = training_step(self.optimizer, [loss], self.sync, moment=self.clock.take).item()
        self.clock.take("end")
        moments = ("start", "forward", "gradient", "synced", "step", "end")
        forward, backward, averaging, step, averaging_parameters = self.clock.seconds(*moments)
        return [forward, backward, averaging + averaging_parameters, step]

    def average_alone(self) -> list[float]:
        """Seconds from gradients that are all ready at once to their averages, or to those of the parameters.

        A step must come first: in the order of its gradients DistributedDataParallel arranges its buckets, and where
        gradients are sparse, they are as sparse as that step's.
        """
        params = trainable_parameters(self.model)

        def ready_gradients() -> torch.Tensor:
            self.sync.model(*self.inputs)  # without a forward before it DistributedDataParallel ignores a backward
            return ReadyGradients.apply(self.clock, [self.sparse.get(param) for param in params], *params)

        backward(self.optimizer, [ready_gradients], self.sync)
        self.sync.after_step(last=False)
        self.clock.take("end")
        return self.clock.seconds("start", "end")


class ReadyGradients(torch.autograd.Function):
    """A loss whose backward computes nothing: the gradients of all parameters are ready at once. Those that are not
    among the `known`, which has None in their place, are zero.

    That moment is the clock's "start".
    """

    @staticmethod
    def forward(ctx: Any, clock: Clock, known: list[torch.Tensor | None], *params: torch.Tensor) -> torch.Tensor:
        ctx.clock, ctx.known = clock, known
        ctx.save_for_backward(*params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.known, ctx.saved_tensors, strict=True)
        gradients = [torch.zeros_like(param) if known is None else known.clone() for known, param in pairs]
        ctx.clock.start()
        return None, None, *gradients


def candidate(
    name: str, model: nn.Module, all_reduce: AllReduce, bucket_cap: int, broadcast: Broadcast = dist.broadcast
) -> GradSync:
    """The gradient synchronisation of a rung; or DistributedDataParallel, with buckets as full as the rungs', and
    buffers left to each rank as in the rungs."""
    if name == DDP:
        return GradSync(DistributedDataParallel(model, bucket_cap_mb=bucket_cap / 2**20, **{BUFFERS: False}))
    return new_grad_sync(name, model, all_reduce, bucket_cap, broadcast=broadcast)
