"""The rung that does what DistributedDataParallel does: gradients are averaged while backward still computes others.

Backward goes through the layers from the last to the first. So the gradients of the last layers are ready early, and
can travel while the first layers' are being computed.
Source: Li et al., PyTorch Distributed, 2020, arXiv 2006.15704, section 3.2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.training.gradients import AllReduce, buckets, trainable_parameters
from playground.training.settings import BUCKET_CAP
from playground.training.sync import GradSync


class Bucket:
    """Gradients that travel together. Their memory is that of the message: each `param.grad` becomes a view of it."""

    def __init__(self, params: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
        """`flat` is memory for all of them, if it is not to be allocated here."""
        self.flat = new_flat(params) if flat is None else flat
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

    @property
    def is_ready(self) -> bool:
        return not self.missing

    def start(self, all_reduce: AllReduce) -> Any:
        """Start the all_reduce of this bucket. Returns what is to be waited for."""
        return all_reduce(self.flat, op=dist.ReduceOp.SUM, async_op=True)

    def reset(self) -> None:
        """Expect the gradients of the next backward."""
        self.missing.update(self.views)


def new_flat(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Memory for as many elements as these have together, all of one type."""
    return params[0].detach().new_zeros(sum(param.numel() for param in params))


def views_of(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter its part of a flat tensor, in the parameter's shape."""
    parts = flat.split([param.numel() for param in params])
    # Strided as the parameter is (channels_last, say), so that backward and optimizer walk both the same way.
    return {
        param: part.as_strided(param.shape, torch.empty_like(param).stride())
        for param, part in zip(params, parts, strict=True)
    }


class OverlappedAverage(GradSync):
    """Each backward starts the averaging, bucket by bucket; `after_backward` waits for its end.

    A bucket leaves as soon as its last gradient is ready and all buckets before it have left: the order of messages
    must be the same on every rank, whatever order gradients get ready in. A gradient that backward does not reach on
    this rank takes part as zero. The gradients of parameters that are `excluded` stay as they are.
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
        self.buckets = [self.new_bucket(of_bucket) for of_bucket in buckets(params, bucket_cap)]
        self.works: list[Any] = []
        """Outstanding work handles of the buckets that have left, in their order."""
        self.is_syncing = True
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.collect, bucket))

    def new_bucket(self, params: Sequence[torch.Tensor]) -> Bucket:
        return Bucket(params)

    def collect(self, bucket: Bucket, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        if not self.is_syncing:
            return
        if param not in bucket.missing:
            raise RuntimeError("a second backward before the first one's gradients were averaged: put it under no_sync")
        bucket.add(param)
        while self.remaining and self.remaining[0].is_ready:
            self.start_next()

    @property
    def remaining(self) -> list[Bucket]:
        """The buckets that have not left yet."""
        return self.buckets[len(self.works) :]

    def start_next(self) -> None:
        """Start the all_reduce of the next bucket."""
        self.works.append(self.start(self.remaining[0]))

    def start(self, bucket: Bucket) -> Any:
        """Start the all_reduce of a bucket. Returns what is to be waited for."""
        return bucket.start(self.all_reduce)

    def start_remaining(self) -> None:
        """Start what backward has not: buckets with a gradient that it did not reach, and those behind them."""
        while self.remaining:
            for param in list(self.remaining[0].missing):
                self.remaining[0].add(param)
            self.start_next()

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        self.start_remaining()
        self.finish()

    def finish(self) -> None:
        """Wait for all buckets, and expect the next backward."""
        for work in self.works:
            work.wait()
        self.works.clear()
        for bucket in self.buckets:
            bucket.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True


def all_reduce_hook(all_reduce: AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, by which DistributedDataParallel averages its buckets with an all-reduce of ours:

        model.register_comm_hook(load_all_reduce("shared-memory"), all_reduce_hook)

    In a thread, while backward goes on; the last bucket at once, for it has nothing to overlap.
    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    flat = bucket.buffer().div_(dist.get_world_size())
    begun: torch.futures.Future[Any] = torch.futures.Future()
    if bucket.is_last():
        all_reduce(flat, op=dist.ReduceOp.SUM)
        begun.set_result(flat)
        return begun
    work: Any = all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)

    def end(_: object) -> torch.Tensor:
        work.wait()
        return flat

    ended = begun.then(end)  # so that an error in it is one to C++ too
    work.future.add_done_callback(lambda _: begun.set_result(None))
    return ended


# torch compares them with its classes, not with their names
all_reduce_hook.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
