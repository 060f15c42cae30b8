"""What a training loop calls so that replicas stay one: at three moments of a step, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from playground.training.gradients import AllReduce
from playground.training.replicas import average_parameters


class Sync:
    """Does nothing by itself: the model sees to it, as DistributedDataParallel does, or each rank trains alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward and backward whose gradients are only to be added to those of the next: nothing is sent."""
        return getattr(self.model, "no_sync", contextlib.nullcontext)()

    def after_backward(self) -> None:
        """Before the optimizer's step; not after what was under `no_sync`."""

    def after_step(self, last: bool) -> None:
        """`last` says that what follows is no step: a test, or the end."""


class AverageAfterBackward(Sync):
    """Gradients are averaged once backward is done. `average(model, *more)` does that."""

    def __init__(self, average: Callable[..., None], model: nn.Module, *more: Any) -> None:
        super().__init__(model)
        self.average, self.more = average, more

    def after_backward(self) -> None:
        self.average(self.model, *self.more)


class AverageParameters(Sync):
    """Each rank steps by its own gradients; after every `every` steps, and after the last, parameters are averaged.

    For SGD, with momentum or without, averaging after every step is the same as averaging gradients: the step is
    linear in them. With `every` > 1 it is not: the ranks compute gradients at places of their own.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, every: int = 1) -> None:
        super().__init__(model)
        self.all_reduce, self.every, self.steps = all_reduce, every, 0

    def after_step(self, last: bool) -> None:
        self.steps += 1
        if last or self.steps % self.every == 0:
            average_parameters(self.model, self.all_reduce)
