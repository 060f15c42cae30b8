"""Two rungs beyond DistributedDataParallel, for CPUs: parameters, gradients and momentum as flat tensors.

PyTorch's SGD takes a step for each parameter in turn, and what it does around the arithmetic takes longer than that for
a small model: three operations on flat tensors do the same. Where the ranks share memory they need no replica each:
there the parameters lie once, each rank sums its share of all gradients, takes the step for that share, and writes it
where all read. That moves 6 S bytes in place of 14 S between two ranks, S being the size of the model.
Source: Rajbhandari et al., ZeRO, 2020, arXiv 1910.02054, where each rank has a share of the optimizer's state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms.messages import segment_of
from playground.algorithms.shared_memory import add_all, agree
from playground.runtime.shared_memory import Segment
from playground.training.sync import AllReduce, Bucket, Overlapped, new_flat, views_of

BLOCK = 128 * 1024
"""Bytes of each tensor for which the ranks take a step at a time, in the cache."""


class FlatStep(Overlapped):
    """All gradients of one type in one bucket, whose all_reduce has nothing to overlap; and SGD on flat tensors."""

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
        super().__init__(model, all_reduce, bucket_cap=float("inf"))
        self.values = [self.new_values([*bucket.views]) for bucket in self.buckets]
        for bucket, values in zip(self.buckets, self.values, strict=True):
            for param, view in views_of(values, [*bucket.views]).items():
                view.copy_(param.detach())
                param.data = view
        self.momenta = [self.new_momentum(values) for values in self.values]

    def new_values(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Memory for the parameters of a bucket."""
        return new_flat(params)

    def new_momentum(self, values: torch.Tensor) -> torch.Tensor:
        """The momentum of those parameters for which this rank takes the step."""
        return torch.zeros_like(values)

    def start(self, bucket: Bucket) -> Any:
        self.all_reduce(bucket.flat, op=dist.ReduceOp.SUM)
        return Done()

    def optimizer(self, new_optimizer: Callable[[Iterable[nn.Parameter]], Any]) -> FlatSGD:
        """SGD with the options of `new_optimizer`'s, which must be SGD too: lr and momentum alone, or `ValueError`."""
        asked = new_optimizer(self.model.parameters())
        lr, momentum = asked.defaults["lr"], asked.defaults.get("momentum", 0.0)
        if not isinstance(asked, torch.optim.SGD) or any(
            asked.defaults[option] for option in ("dampening", "weight_decay", "nesterov", "maximize")
        ):
            raise ValueError(f"only SGD with lr and momentum is done on flat tensors, not {asked}")
        return FlatSGD(self, lr, momentum)

    def step(self, lr: float, momentum: float) -> None:
        """The optimizer's step: three operations on each flat tensor."""
        for bucket, values, buffer in zip(self.buckets, self.values, self.momenta, strict=True):
            buffer.mul_(momentum).add_(bucket.flat)
            values.add_(buffer, alpha=-lr)


class SharedStep(FlatStep):
    """The ranks of one host share the parameters, in `segment`. Backward only puts gradients where all can read them;
    the optimizer's step sums them."""

    def __init__(self, model: nn.Module, segment: Segment) -> None:
        self.segment = segment
        self.of_all: list[list[torch.Tensor]] = []
        """For each bucket the flat gradients of all ranks."""
        super().__init__(model, all_reduce=lambda flat, op: None)  # nothing is sent
        self.segment.run(Segment.meet)  # the first has written the parameters

    def new_bucket(self, params: Sequence[torch.Tensor]) -> Bucket:
        self.of_all.append(self.segment.allocate(sum(param.numel() for param in params), params[0].dtype))
        return Bucket(params, self.of_all[-1][self.segment.rank])

    def new_values(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.segment.allocate(sum(param.numel() for param in params), params[0].dtype, tensors=1)[0]

    def new_momentum(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(range(*self.segment.share_of(values.numel()))))

    def step(self, lr: float, momentum: float) -> None:
        self.segment.run(self.step_for_all, lr, momentum)

    def step_for_all(self, segment: Segment, lr: float, momentum: float) -> None:
        """Sum this rank's share of all gradients and take the step for it, block by block, in the cache."""
        agree(segment, "step", self.values[0])
        for gradients, values, buffer in zip(self.of_all, self.values, self.momenta, strict=True):
            begin, end = segment.share_of(values.numel())
            block = BLOCK // values.itemsize
            space = values.new_empty(block)
            for first in range(begin, end, block):
                last = min(first + block, end)
                parts = [gradient[first:last] for gradient in gradients]
                total = space[: last - first]
                add_all(torch.add, parts, out=total)
                momenta = buffer[first - begin : last - begin].mul_(momentum).add_(total)
                values[first:last].add_(momenta, alpha=-lr)
        segment.meet()


def new_shared_step(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> FlatStep:
    """A `SharedStep` where all ranks share memory; otherwise a `FlatStep`."""
    segment = segment_of(dist.group.WORLD, next(model.parameters()).device)
    if isinstance(segment, Segment) and 1 < segment.size == dist.get_world_size():
        return SharedStep(model, segment)
    return FlatStep(model, all_reduce)


class Done:
    """The handle of what is done already."""

    def wait(self) -> None:
        pass


class FlatSGD:
    """SGD with momentum, as torch.optim.SGD, on the flat tensors of a `FlatStep`."""

    def __init__(self, sync: FlatStep, lr: float, momentum: float) -> None:
        self.sync, self.lr, self.momentum = sync, lr, momentum

    def zero_grad(self) -> None:
        for bucket in self.sync.buckets:
            for param in bucket.views:
                param.grad = None

    def step(self) -> None:
        with torch.no_grad():
            self.sync.step(self.lr, self.momentum)
