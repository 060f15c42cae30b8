"""From `average_gradients` to what DistributedDataParallel does, rung by rung.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground ladder
    python -m playground ladder --model resnet18 --steps 20 --batch-size 32
    python -m playground ladder --model bert
    python -m playground ladder -n 4 --bucket-cap-mb 0.02 --all-reduce ring

Each rung leaves the mean over all ranks in every `param.grad`. The first four are functions that
are called when backward is done; the last begins during backward. By the command all train the
same model in turn, with a clock on each part of a step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_CAP = 25 * 2**20
"""Bytes after which a bucket is full: DistributedDataParallel's default, too."""


def per_parameter(model: nn.Module, all_reduce: Any = dist.all_reduce) -> None:
    """One all_reduce per parameter: sgd's `average_gradients`.

    Raises `ValueError` for a parameter without a gradient: the other ranks would wait for it.
    """
    for name, param in model.named_parameters():
        if param.grad is None and param.requires_grad:
            at = f"{name} has no gradient on rank {dist.get_rank()}"
            raise ValueError(f"{at}: this needs a way that is None-safe")
    none_safe(model, all_reduce)


def none_safe(model: nn.Module, all_reduce: Any = dist.all_reduce) -> None:
    """The same, but a gradient that is None (these samples took another branch) counts as zero."""
    for grad in gradients(model):
        all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= dist.get_world_size()


def flat(model: nn.Module, all_reduce: Any = dist.all_reduce) -> None:
    """One all_reduce for all gradients: many small messages take longer than a large one."""
    for grads in buckets(gradients(model)):
        average_together(grads, all_reduce)


def bucketed(
    model: nn.Module, all_reduce: Any = dist.all_reduce, bucket_cap: float = BUCKET_CAP
) -> None:
    """One all_reduce per bucket, the last layers' first: the copy to be sent is no larger."""
    for grads in buckets(gradients(model)[::-1], bucket_cap):
        average_together(grads, all_reduce)


def average_together(grads: Sequence[torch.Tensor], all_reduce: Any) -> None:
    """Leave in every tensor its mean over all ranks. They are of one type: one message."""
    message = torch.cat([grad.flatten() for grad in grads])
    all_reduce(message, op=dist.ReduceOp.SUM)
    message /= dist.get_world_size()
    averaged = message.split([grad.numel() for grad in grads])
    for grad, mean in zip(grads, averaged, strict=True):
        grad.copy_(mean.view_as(grad))


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that backward computes gradients for, in the order of the layers."""
    return [param for param in model.parameters() if param.requires_grad]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of every trainable parameter, zero where this rank has none."""
    params = trainable_parameters(model)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in params]


def buckets(
    tensors: Iterable[torch.Tensor], cap: float = float("inf")
) -> Iterator[list[torch.Tensor]]:
    """Tensors of one type that travel together: a bucket is full when it has `cap` bytes."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= cap:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()


class Bucket:
    """Gradients in the memory of their message: each `param.grad` is a view of it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.flat = params[0].detach().new_zeros(sum(param.numel() for param in params))
        self.weight = 1 / dist.get_world_size()
        self.views = views_of(self.flat, params)
        self.missing = set(params)  # those whose gradients are not in the bucket yet

    def add(self, param: torch.Tensor) -> None:
        """Put this rank's gradient of `param` into the bucket, as its part of the mean."""
        view = self.views[param]
        if param.grad is None:
            view.zero_()
        elif param.grad is view:  # backward has added to what was there: nothing to copy
            view *= self.weight
        else:
            torch.mul(param.grad, self.weight, out=view)
        param.grad = view
        self.missing.remove(param)


def views_of(
    flat: torch.Tensor, params: Sequence[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter its part of a flat tensor, with the parameter's shape and strides."""
    parts = flat.split([param.numel() for param in params])
    return {
        param: part.as_strided(param.shape, torch.empty_like(param).stride())
        for param, part in zip(params, parts, strict=True)
    }


class Overlapped:
    """Buckets leave during backward, each as soon as its last gradient is ready.

    Backward goes from the last layer to the first. All ranks must send in the same order, whatever
    order gradients get ready in: a bucket waits for those before it.
    Source: Li et al., PyTorch Distributed, 2020, arXiv 2006.15704, section 3.2
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        all_reduce: Any = dist.all_reduce,
        bucket_cap: float = BUCKET_CAP,
    ) -> None:
        self.all_reduce = all_reduce
        trained = [param for param in params if param.requires_grad]
        self.buckets = [Bucket(of_bucket) for of_bucket in buckets(trained[::-1], bucket_cap)]
        self.works: list[Any] = []  # of the buckets that have left, in their order
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.collect, bucket))

    def collect(self, bucket: Bucket, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
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

    def after_backward(self) -> None:
        """Wait until every `param.grad` is the mean."""
        self.start_remaining()
        self.finish()


def train(model: nn.Module, average: Callable[[], object], steps: int) -> float:
    """Take steps on random inputs, other ones on each rank. Returns the median of their seconds."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds = []
    for _ in range(steps):
        inputs = torch.randn(64, 256)
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        average()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def climb(rank: int, size: int, steps: int = 50) -> None:
    """Train copies of a model, one on each rung and one in DDP, and compare them with the first."""
    torch.manual_seed(1234)
    start = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)))
    first: list[torch.Tensor] = []
    for name in ("per_parameter", "none_safe", "flat", "bucketed", "overlapped", "ddp"):
        model = copy.deepcopy(start)
        if name == "overlapped":
            average = Overlapped(model.parameters(), bucket_cap=2**20).after_backward
        elif name == "ddp":
            model, average = DistributedDataParallel(model, bucket_cap_mb=1), lambda: None
        else:
            average = partial(globals()[name], model)
        seconds = train(model, average, steps)
        params = [param.detach() for param in model.parameters()]
        first = first or params
        apart = max(
            (one - other).abs().max().item() for one, other in zip(first, params, strict=True)
        )
        if rank == 0:
            print(f"{name:14}{1000 * seconds:6.2f} ms a step, {apart:.1e} from the first rung")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    climb(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
