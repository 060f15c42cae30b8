"""The last rung before DistributedDataParallel: gradients are averaged while backward still computes others.

Backward goes through the layers from the last to the first. So the gradients of the last layers are ready early, and
can travel while the first layers' are being computed.
Source: Li et al., PyTorch Distributed, 2020, arXiv 2006.15704, section 3.2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.training.gradients import BUCKET_CAP, AllReduce, buckets, learning
from playground.training.sync import Sync


class Bucket:
    """Gradients that travel together. Their memory is that of the message: each `param.grad` becomes a view of it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        lengths = [param.numel() for param in params]
        self.flat = params[0].detach().new_zeros(sum(lengths))
        self.share = 1 / dist.get_world_size()
        # Strided as the parameter is (channels_last, say), so that backward and optimizer walk both the same way.
        self.views = {
            param: part.as_strided(param.shape, torch.empty_like(param).stride())
            for param, part in zip(params, self.flat.split(lengths), strict=True)
        }
        self.waiting = set(params)

    def put(self, param: torch.Tensor) -> None:
        """This rank's gradient of `param` is complete: let it be in the bucket, as its share of the mean."""
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is view:  # backward has added to what was there: nothing to copy
            view *= self.share
        else:
            torch.mul(param.grad, self.share, out=view)
        param.grad = view
        self.waiting.remove(param)


class OverlappedAverage(Sync):
    """Each backward starts the averaging, bucket by bucket; `after_backward` waits for its end.

    A bucket travels as soon as its last gradient is there and all buckets before it have left: the order of messages
    must be the same on every rank, whatever order gradients come in. What backward does not reach on this rank takes
    part as zero.
    """

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce, bucket_cap: int = BUCKET_CAP) -> None:
        super().__init__(model)
        self.all_reduce = all_reduce
        self.buckets = [Bucket(params) for params in buckets(learning(model)[::-1], bucket_cap)]
        self.under_way: list[Any] = []
        self.syncing = True
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.ready, bucket))

    def ready(self, bucket: Bucket, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        if not self.syncing:
            return
        if param not in bucket.waiting:
            raise RuntimeError("a second backward before the first one's gradients were averaged: put it under no_sync")
        bucket.put(param)
        while self.to_leave and not self.to_leave[0].waiting:
            self.start()

    @property
    def to_leave(self) -> list[Bucket]:
        return self.buckets[len(self.under_way) :]

    def start(self) -> None:
        """Let the next bucket travel."""
        self.under_way.append(self.all_reduce(self.to_leave[0].flat, op=dist.ReduceOp.SUM, async_op=True))

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        while self.to_leave:
            for param in list(self.to_leave[0].waiting):
                self.to_leave[0].put(param)
            self.start()
        for work in self.under_way:
            work.wait()
        self.under_way.clear()
        for bucket in self.buckets:
            bucket.waiting.update(bucket.views)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True
