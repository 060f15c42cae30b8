"""Gradient synchronisation: the calls of a training step that keep replicas equal, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from playground.algorithms import load_all_reduce
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.gradients import AllReduce
from playground.training.replicas import average_parameters
from playground.training.settings import BUCKET_CAP, TrainingSettings

Broadcast = Callable[..., object]
"""Called as `broadcast(tensor, src=…, group=…)`, in place."""


class GradSync:
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

    def go_on_from(self, step: int) -> None:
        """Set the number of completed steps, which another run of the same training has taken."""

    def optimizer(self, new_optimizer: Callable[[Iterable[nn.Parameter]], Any]) -> Any:
        """The optimizer for the model, `new_optimizer(parameters)` unless it is part of the synchronisation."""
        return new_optimizer(self.model.parameters())

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether they are equal after every step, and not only now and then."""
        return True


class AverageAfterBackward(GradSync):
    """Gradients are averaged once backward is done: `average(model, **needs)` does that."""

    def __init__(self, average: Callable[..., None], model: nn.Module, **needs: Any) -> None:
        super().__init__(model)
        self.average, self.needs = average, needs

    def after_backward(self) -> None:
        self.average(self.model, **self.needs)


class AverageParameters(GradSync):
    """Local SGD: each rank steps by its own gradients; after every `sync_every` steps, and after the last, parameters
    are averaged.

    For SGD, with momentum or without, averaging after every step is the same as averaging gradients: the step is
    linear in them. With `sync_every` > 1 it is not: the ranks compute gradients at places of their own.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, sync_every: int = 1) -> None:
        super().__init__(model)
        self.all_reduce, self.sync_every, self.steps = all_reduce, sync_every, 0

    def go_on_from(self, step: int) -> None:
        self.steps = step

    @property
    def keeps_replicas_equal(self) -> bool:
        return self.sync_every == 1

    def after_step(self, last: bool) -> None:
        self.steps += 1
        if last or self.steps % self.sync_every == 0:
            average_parameters(self.model, self.all_reduce)


def new_grad_sync(
    name: str,
    model: nn.Module,
    all_reduce: AllReduce = dist.all_reduce,
    bucket_cap: int = BUCKET_CAP,
    sync_every: int = 1,
    broadcast: Broadcast = dist.broadcast,
) -> GradSync:
    """The gradient synchronisation of that name for `model`, made once, before its first backward. All ranks must call
    this in the same order, for some make process groups."""
    spec = GRAD_SYNCS[name]
    values = {"all_reduce": all_reduce, "bucket_cap": bucket_cap, "sync_every": sync_every, "broadcast": broadcast}
    needs = {need: values[need] for need in spec.needs}
    code = spec.code.load()
    return code(model, **needs) if isinstance(code, type) else AverageAfterBackward(code, model, **needs)


def build_grad_sync(model: nn.Module, settings: TrainingSettings) -> GradSync:
    """The gradient synchronisation for `model` that `settings` ask for."""
    all_reduce = load_all_reduce(settings.all_reduce)
    return new_grad_sync(settings.sync, model, all_reduce, settings.bucket_cap, settings.sync_every)
