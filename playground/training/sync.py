"""Gradient synchronisation: what keeps replicas equal in a training step, from the tutorial's loop
to overlapping.

    sync = new_grad_sync("flat", model)  before the first backward
    sync.after_backward()                after each: leaves in every `param.grad` the mean over all

Functions that are called after backward stand in `averaging`. What takes part at several moments of
a step is a class, a `GradSync`. All ranks must call the same: every all_reduce in here waits for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.training.averaging import (
    BUCKET_CAP,
    AllReduceCall,
    Bucket,
    average_together,
    buckets,
    gradients,
    trainable_parameters,
)
from playground.training.grad_syncs import GRAD_SYNCS

SECOND_BACKWARD = (
    "a second backward before the optimizer's step: add the losses, and call backward once"
)


class GradSync:
    """Calls `average(model)` once backward is done; by default does nothing by itself: the model
    sees to it, as DistributedDataParallel does, or each rank trains alone."""

    keeps_replicas_equal = True
    """Whether they are equal after every step, and not only now and then."""

    def __init__(
        self, model: nn.Module, average: Callable[[nn.Module], object] = lambda model: None
    ) -> None:
        self.model = model
        self.average = average

    def after_backward(self) -> None:
        """Before the optimizer's step."""
        self.average(self.model)

    def after_step(self, last: bool) -> None:
        """`last` says that what follows is no step: a test, or the end."""

    def optimizer(self, new_optimizer: Callable[[Iterable[nn.Parameter]], Any]) -> Any:
        """`new_optimizer(parameters)`, with a `zero_grad` that calls the one here, too."""
        optimizer = new_optimizer(self.optimized())
        zero_grad = optimizer.zero_grad

        def zero_all(set_to_none: bool = True) -> None:
            self.zero_grad()
            zero_grad(set_to_none)

        optimizer.zero_grad = zero_all
        return optimizer

    def optimized(self) -> Iterable[nn.Parameter]:
        """What the optimizer steps for."""
        return self.model.parameters()

    def zero_grad(self) -> None:
        """Forget the gradients that are kept here, whatever became of the last backward: it may
        have failed, or its step may have been skipped."""


class SyncInBackward(GradSync):
    """One whose backward sends messages. It sets `has_begun` with the first."""

    has_begun = False

    def zero_grad(self) -> None:
        """What a backward that raised has begun is completed: the other ranks' may have come
        further."""
        if self.has_begun:
            self.after_backward()
        super().zero_grad()


class OverlappedSync(SyncInBackward):
    """Buckets leave during backward, each as soon as its last gradient is ready.

    Backward goes from the last layer to the first. All ranks must send in the same order, whatever
    order gradients get ready in: a bucket waits for the buckets before it. After a backward that
    raised, on whichever ranks it was, all call `zero_grad`. The gradients of parameters that are
    `excluded` stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        all_reduce: AllReduceCall = dist.all_reduce,
        bucket_cap: float = BUCKET_CAP,
        excluded: Set[nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__(model)
        self.all_reduce = all_reduce
        params = [param for param in trainable_parameters(model) if param not in excluded]
        self.buckets = [Bucket(of_bucket) for of_bucket in buckets(params[::-1], bucket_cap)]
        self.works: list[Any] = []  # of the buckets that have left, in their order
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.collect, bucket))

    def collect(self, bucket: Bucket, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete. Raises `RuntimeError` if it was."""
        if param not in bucket.missing:
            raise RuntimeError(SECOND_BACKWARD)
        self.has_begun = True
        bucket.add(param)
        while self.remaining and not self.remaining[0].missing:
            self.start(self.remaining[0])

    @property
    def remaining(self) -> list[Bucket]:
        """The buckets that have not left yet."""
        return self.buckets[len(self.works) :]

    def start(self, bucket: Bucket) -> None:
        """Start the all_reduce of the first bucket that has not left."""
        self.works.append(self.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, async_op=True))

    def start_remaining(self) -> None:
        """Start the buckets that lack a gradient, which backward did not reach, as zero."""
        for bucket in self.remaining:
            for param in list(bucket.missing):
                bucket.add(param)
            self.start(bucket)

    def finish(self) -> None:
        """Wait for all buckets, and expect the next backward."""
        for bucket in self.buckets:
            self.works.pop(0).wait()
            bucket.missing.update(bucket.views)
        self.has_begun = False

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        self.start_remaining()
        self.finish()


class LocalSGD(GradSync):
    """Local SGD: each rank steps by its own gradients; after every `sync_every` steps, and after
    the last, parameters are averaged.

    For SGD, with momentum or without, averaging after every step is the same as averaging
    gradients: the step is linear in them. With `sync_every` > 1 it is not: the ranks compute
    gradients at places of their own. A gradient that is None is zero here, too: the optimizer would
    leave out the parameter, momentum and all.
    """

    def __init__(
        self, model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce, sync_every: int = 1
    ) -> None:
        super().__init__(model)
        self.all_reduce = all_reduce
        self.sync_every = sync_every
        self.steps = 0
        self.keeps_replicas_equal = sync_every == 1

    def after_backward(self) -> None:
        gradients(self.model)

    def after_step(self, last: bool) -> None:
        self.steps += 1
        if last or self.steps % self.sync_every == 0:
            with torch.no_grad():
                for params in buckets(list(self.model.parameters())):
                    average_together(params, self.all_reduce)


def all_reduce_hook(
    all_reduce: AllReduceCall, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, by which DistributedDataParallel averages its buckets with an
    all-reduce of ours:

        model.register_comm_hook(load_all_reduce("shared-memory"), all_reduce_hook)

    Backward goes on when the bucket is averaged.
    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    message = bucket.buffer().div_(dist.get_world_size())
    averaged = torch.futures.Future[torch.Tensor]()
    all_reduce(message, op=dist.ReduceOp.SUM)
    averaged.set_result(message)
    return averaged


# torch compares them with its classes, not with their names
all_reduce_hook.__annotations__ |= {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def new_grad_sync(name: str, model: nn.Module, **values: Any) -> GradSync:
    """The gradient synchronisation of that name for `model`, made once, before its first backward:
    with those of the `values`, by name, that it needs, and its own defaults for the others. Raises
    `TypeError` for a value that none of them needs."""
    if unknown := values.keys() - {need for spec in GRAD_SYNCS.values() for need in spec.needs}:
        raise TypeError(f"no gradient synchronisation takes {', '.join(sorted(unknown))}")
    spec = GRAD_SYNCS[name]
    code, needs = spec.code.load(), {need: values[need] for need in spec.needs if need in values}
    makes_one = spec.takes_step or isinstance(code, type)
    return code(model, **needs) if makes_one else GradSync(model, partial(code, **needs))
