"""Gradient synchronisation: what keeps replicas equal in a training step, from the tutorial's loop to overlapping.

    flat(model)                                 after backward, on every rank
    flat(model, all_reduce=ring)                with an all-reduce of ours
    sync = Overlapped(model)                    before the first backward; `sync.after_backward()` after each

The functions are called after backward, with this rank's gradients in every `param.grad`, and leave there their mean
over all ranks. What takes part at several moments of a step is a class, a `GradSync`. All ranks must call the same:
every all_reduce in here waits for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms import load_all_reduce
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.link import Link
from playground.training.settings import BUCKET_CAP, TrainingSettings

AllReduce = Callable[..., object]
"""Called as `all_reduce(tensor, op=…)`, in place; with `async_op=True` it returns at once something to `wait()` for."""


def per_parameter(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce per parameter, as the tutorial does it: `average_gradients` of the lesson sgd.

    Raises `ValueError` for a parameter without a gradient: to skip it would leave the other ranks waiting, or, on all,
    hide that it is not trained. Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    """
    for name, param in model.named_parameters():
        if param.grad is None and param.requires_grad:
            raise ValueError(f"{name} has no gradient on rank {dist.get_rank()}: this needs a way that is None-safe")
    none_safe(model, all_reduce)


def none_safe(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """The same, but a gradient that is None (this rank's samples took another branch) takes part, as zero."""
    for grad in gradients(model):
        all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= dist.get_world_size()


def flat(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """One all_reduce for all gradients: each message has a latency, so eight small ones take longer than one of the
    same bytes."""
    for grads in buckets(gradients(model)):
        average_together(grads, all_reduce)


def bucketed(model: nn.Module, all_reduce: AllReduce = dist.all_reduce, bucket_cap: float = BUCKET_CAP) -> None:
    """One all_reduce per bucket, the last layers' first: the copy to be sent takes the memory of one bucket, not of all
    gradients."""
    for grads in buckets(gradients(model)[::-1], bucket_cap):
        average_together(grads, all_reduce)


def average_together(grads: Sequence[torch.Tensor], all_reduce: AllReduce) -> None:
    """Leave in every tensor its mean over all ranks. They are of one type, and travel in a single message."""
    message = torch.cat([grad.flatten() for grad in grads])
    all_reduce(message, op=dist.ReduceOp.SUM)
    message /= dist.get_world_size()
    for grad, averaged in zip(grads, message.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(averaged.view_as(grad))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that backward computes gradients for, in the order of the layers."""
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every trainable parameter, zero where this rank has none."""
    params = trainable_parameters(model)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params if param.grad is not None]


def buckets(tensors: Sequence[torch.Tensor], cap: float = float("inf")) -> Iterator[list[torch.Tensor]]:
    """Cut a sequence of tensors into those that travel together: a bucket is full once it holds `cap` bytes or more.

    Every type has buckets of its own, since a message has one type.
    """
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= cap:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()


class GradSync:
    """Calls `average(model)` once backward is done; by default does nothing by itself: the model sees to it, as
    DistributedDataParallel does, or each rank trains alone."""

    keeps_replicas_equal = True
    """Whether they are equal after every step, and not only now and then."""

    def __init__(self, model: nn.Module, average: Callable[[nn.Module], object] = lambda model: None) -> None:
        self.model, self.average = model, average

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward and backward whose gradients are only to be added to those of the next: nothing is sent."""
        return getattr(self.model, "no_sync", contextlib.nullcontext)()

    def after_backward(self) -> None:
        """Before the optimizer's step; not after what was under `no_sync`."""
        self.average(self.model)

    def after_step(self, last: bool) -> None:
        """`last` says that what follows is no step: a test, or the end."""

    def go_on_from(self, step: int) -> None:
        """Set the number of completed steps, which another run of the same training has taken."""

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
        """Forget the gradients that are kept here, whatever became of the last backward: it may have failed, or its
        step may have been skipped."""


class Overlapped(GradSync):
    """DistributedDataParallel's way: each backward starts the averaging, bucket by bucket, and goes on;
    `after_backward` waits for its end.

    Backward goes through the layers from the last to the first: the last layers' gradients are ready early. A bucket
    leaves as soon as its last gradient is ready and all buckets before it have left: the order of messages must be the
    same on every rank, whatever order gradients get ready in. A gradient that backward does not reach on this rank
    takes part as zero. The gradients of parameters that are `excluded` stay as they are.
    After a backward that raised, on whichever ranks, all call `zero_grad`.
    Source: Li et al., PyTorch Distributed, 2020, arXiv 2006.15704, section 3.2
    """

    def __init__(
        self,
        model: nn.Module,
        all_reduce: AllReduce = dist.all_reduce,
        bucket_cap: float = BUCKET_CAP,
        excluded: Set[nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__(model)
        self.all_reduce = all_reduce
        params = [param for param in trainable_parameters(model)[::-1] if param not in excluded]
        self.buckets = [Bucket(of_bucket) for of_bucket in buckets(params, bucket_cap)]
        self.works: list[Any] = []
        """Outstanding work handles of the buckets that have left, in their order."""
        self.is_syncing, self.has_begun = True, False
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.collect, bucket))

    def collect(self, bucket: Bucket, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        if not self.is_syncing:
            return
        if param not in bucket.missing:
            raise RuntimeError("a second backward before the first one's gradients were averaged: put it under no_sync")
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
        """Start what backward has not: buckets with a gradient that it did not reach, and those behind them."""
        for bucket in self.remaining:
            for param in list(bucket.missing):
                bucket.add(param)
            self.start(bucket)

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        self.start_remaining()
        self.finish()

    def finish(self) -> None:
        """Wait for all buckets, and expect the next backward."""
        for bucket in self.buckets:
            self.works.pop(0).wait()
            bucket.missing.update(bucket.views)
        self.has_begun = False

    def zero_grad(self) -> None:
        """What a backward that raised has begun is completed: the other ranks' may have come further."""
        if self.has_begun:
            self.after_backward()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return pausing(self)


@contextlib.contextmanager
def pausing(sync: Any) -> Iterator[None]:
    """Let a synchronisation whose backward sends messages, unless `is_syncing` is False, send none in this block."""
    before, sync.is_syncing = sync.is_syncing, False
    try:
        yield
    finally:
        sync.is_syncing = before


class Bucket:
    """Gradients that travel together. Their memory is that of the message: each `param.grad` becomes a view of it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.flat = params[0].detach().new_zeros(sum(param.numel() for param in params))
        self.weight = 1 / dist.get_world_size()
        self.views = views_of(self.flat, params)
        self.missing = set(params)
        """The parameters whose gradients are not in the bucket yet."""

    def add(self, param: torch.Tensor) -> None:
        """Put this rank's gradient of `param`, which is complete, into the bucket, as its part of the mean."""
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is view:  # backward has added to what was there: nothing to copy
            view *= self.weight
        else:
            torch.mul(param.grad, self.weight, out=view)
        param.grad = view
        self.missing.remove(param)


def views_of(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter its part of a flat tensor, in the parameter's shape."""
    parts = flat.split([param.numel() for param in params])
    # Strided as the parameter is (channels_last, say), so that backward and optimizer walk both the same way.
    return {
        param: part.as_strided(param.shape, torch.empty_like(param).stride())
        for param, part in zip(params, parts, strict=True)
    }


class LocalSGD(GradSync):
    """Local SGD: each rank steps by its own gradients; after every `sync_every` steps, and after the last, parameters
    are averaged.

    For SGD, with momentum or without, averaging after every step is the same as averaging gradients: the step is
    linear in them. With `sync_every` > 1 it is not: the ranks compute gradients at places of their own. A gradient that
    is None is zero here, too: the optimizer would leave out the parameter, momentum and all.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, sync_every: int = 1) -> None:
        super().__init__(model)
        self.all_reduce, self.sync_every, self.steps = all_reduce, sync_every, 0
        self.keeps_replicas_equal = sync_every == 1

    def go_on_from(self, step: int) -> None:
        self.steps = step

    def after_backward(self) -> None:
        gradients(self.model)

    def after_step(self, last: bool) -> None:
        self.steps += 1
        if last or self.steps % self.sync_every == 0:
            with torch.no_grad():
                for params in buckets(list(self.model.parameters())):
                    average_together(params, self.all_reduce)


def all_reduce_hook(all_reduce: AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, by which DistributedDataParallel averages its buckets with an all-reduce of ours:

        model.register_comm_hook(load_all_reduce("shared-memory"), all_reduce_hook)

    Backward goes on when the bucket is averaged.
    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    message, averaged = bucket.buffer().div_(dist.get_world_size()), torch.futures.Future[torch.Tensor]()
    all_reduce(message, op=dist.ReduceOp.SUM)
    averaged.set_result(message)
    return averaged


# torch compares them with its classes, not with their names
all_reduce_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def new_grad_sync(name: str, model: nn.Module, **values: Any) -> GradSync:
    """The gradient synchronisation of that name for `model`, made once, before its first backward: with those of the
    `values`, by name, that it needs, and its own defaults for the others. Raises `TypeError` for a value that none of
    them needs."""
    if unknown := values.keys() - {need for spec in GRAD_SYNCS.values() for need in spec.needs}:
        raise TypeError(f"no gradient synchronisation takes {', '.join(sorted(unknown))}")
    spec = GRAD_SYNCS[name]
    code, needs = spec.code.load(), {need: values[need] for need in spec.needs if need in values}
    makes_one = spec.takes_step or isinstance(code, type)
    return code(model, **needs) if makes_one else GradSync(model, partial(code, **needs))


def build_grad_sync(model: nn.Module, settings: TrainingSettings) -> GradSync:
    """The gradient synchronisation for `model` that `settings` ask for."""
    all_reduce = load_all_reduce(settings.all_reduce)
    if settings.link:
        all_reduce = Link(settings.link).all_reduce(all_reduce)
    values = {"bucket_cap": settings.bucket_cap, "sync_every": settings.sync_every}
    return new_grad_sync(settings.sync, model, all_reduce=all_reduce, **values)
