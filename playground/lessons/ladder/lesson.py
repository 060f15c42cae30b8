"""From `average_gradients` to DistributedDataParallel, rung by rung, each measured.

    python -m playground ladder
    python -m playground ladder --model resnet18 --plot ladder.svg
    python -m playground ladder --model bert
    python -m playground ladder -n 4 --bucket-cap-mb 0.02 --all-reduce ring

All train the same model on the same batches with the same dropout masks. In every round each takes one step, in an
order that changes, so that whatever else the machine does meets all of them. In the same rounds each also averages
gradients without a backward to hide behind, which shows how much of that it hides in its steps.
`--bucket-cap-mb` holds for the rungs and for DistributedDataParallel. `--all-reduce` is for the rungs:
DistributedDataParallel has the backend's.
Every rung stands here, but for the one for embeddings: sparse_embeddings.py, beside this; what is measured of them, and
how: measure.py. The same for any model, with what may go wrong, is what `sgd --sync` takes:
playground/training/grad_syncs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.lessons.ladder.measure import measure
from playground.lessons.ladder.page import DDP, MODELS, SPARSE, LadderResult, LadderSettings, candidates
from playground.lessons.ladder.sparse_embeddings import SparseEmbeddings
from playground.lessons.sgd.lesson import average_gradients
from playground.runtime import device, host
from playground.runtime.meeting.agreement import require_same_on_all_ranks
from playground.training import gradients
from playground.training.flat_step import FlatStep, SharedStep
from playground.training.hierarchical import groups_of
from playground.training.overlap import Bucket
from playground.training.replicas import average_parameters, broadcast_parameters
from playground.training.sync import AverageAfterBackward, GradSync, new_grad_sync


def none_safe(model: nn.Module) -> None:
    """`average_gradients` of the lesson sgd, but a gradient that is None (this rank's samples took another branch)
    takes part as zero."""
    for grad in gradients.gradients(model):
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
        grad /= dist.get_world_size()


def flat(model: nn.Module, all_reduce: gradients.AllReduce | None = None) -> None:
    """One all_reduce for all gradients: each message has a latency, so eight small ones take longer than one of the
    same bytes."""
    for grads in gradients.buckets(gradients.gradients(model)):
        gradients.average_together(grads, all_reduce or dist.all_reduce)


def bucketed(model: nn.Module, bucket_cap: int) -> None:
    """One all_reduce per bucket, the last layers' first: the copy to be sent takes the memory of one bucket, not of all
    gradients."""
    for grads in gradients.buckets(gradients.gradients(model)[::-1], bucket_cap):
        gradients.average_together(grads, dist.all_reduce)


def hierarchical(model: nn.Module) -> None:
    """All gradients in one message, added up inside pairs of ranks, between the leaders of the pairs, and sent back."""
    groups = groups_of(dist.group.WORLD)  # made at the first call

    def in_two_levels(tensor: torch.Tensor, op: Any) -> None:
        dist.all_reduce(tensor, op=op, group=groups.mine)
        if dist.get_rank() == groups.leader:
            dist.all_reduce(tensor, op=op, group=groups.leaders)
        dist.broadcast(tensor, src=groups.leader, group=groups.mine)

    flat(model, in_two_levels)


class Overlapped(GradSync):
    """A bucket leaves as soon as its gradients are ready and all buckets before it have left, while backward computes
    the others."""

    def __init__(self, model: nn.Module, bucket_cap: int) -> None:
        super().__init__(model)
        params = gradients.trainable_parameters(model)[::-1]  # the last layers' gradients are ready first
        self.buckets, self.works = [Bucket(each) for each in gradients.buckets(params, bucket_cap)], list[Any]()
        for param, collect in ((param, partial(self.collect, each)) for each in self.buckets for param in each.views):
            param.register_post_accumulate_grad_hook(collect)

    def collect(self, bucket: Bucket, param: torch.Tensor) -> None:
        bucket.add(param)
        while len(self.works) < len(self.buckets) and self.buckets[len(self.works)].is_ready:
            self.works.append(self.buckets[len(self.works)].start(dist.all_reduce))

    def after_backward(self) -> None:
        for bucket in self.buckets:
            self.works.pop(0).wait()
            bucket.reset()


class LocalSGD(GradSync):
    """Local SGD, not a rung but a different approach: each rank steps by its own gradients, then parameters are
    averaged."""

    def after_step(self, last: bool) -> None:
        average_parameters(self.model, dist.all_reduce)


def ddp(model: nn.Module, bucket_cap: int) -> GradSync:
    """DistributedDataParallel, with buckets as full as the rungs', and buffers left to each rank as in the rungs."""
    options = signature(DistributedDataParallel).parameters  # what torch calls it depends on its version
    buffers = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options)
    return GradSync(DistributedDataParallel(model, bucket_cap_mb=bucket_cap / 2**20, **{buffers: False}))


RUNGS: dict[str, Callable[[nn.Module, int], GradSync]] = {
    "per-parameter": lambda model, _: AverageAfterBackward(average_gradients, model),  # of the lesson sgd
    "none-safe": lambda model, _: AverageAfterBackward(none_safe, model),
    "flat": lambda model, _: AverageAfterBackward(flat, model),
    "bucketed": lambda model, cap: AverageAfterBackward(bucketed, model, bucket_cap=cap),
    "hierarchical": lambda model, _: AverageAfterBackward(hierarchical, model),
    "overlapped": Overlapped,
    SPARSE: lambda model, cap: SparseEmbeddings(model, patched_all_reduce, cap),
    "parameters": lambda model, _: LocalSGD(model),
    "flat-step": lambda model, _: FlatStep(model, patched_all_reduce),
    "shared-step": lambda model, _: SharedStep(model, patched_all_reduce),
    DDP: ddp,
}
"""Makes each rung's gradient synchronisation; called with the model and the bytes of a full bucket."""


def patched_all_reduce(tensor: torch.Tensor, **options: Any) -> Any:
    """`dist.all_reduce`, as it is when this is called: the measurement puts others in its place."""
    return dist.all_reduce(tensor, **options)


def new_rung(name: str, model: nn.Module, bucket_cap: int) -> GradSync:
    """The gradient synchronisation of that name for `model`: what stands above or, where that has none, ours."""
    if name in RUNGS:
        return RUNGS[name](model, bucket_cap)
    return new_grad_sync(name, model, patched_all_reduce, bucket_cap)


def run(rank: int, size: int, settings: LadderSettings) -> LadderResult:
    """Train the model on every rung, and in DistributedDataParallel, with a clock on each. All ranks return the same.

    Raises `UsageError` if the ranks were not all given the same settings.
    """
    require_same_on_all_ranks(settings.on_all_ranks())
    host.keep_to_one_core()
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model].code().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(model)
    rungs = {name: partial(new_rung, name, bucket_cap=settings.bucket_cap) for name in candidates(settings.model)}
    return measure(rungs, model, settings)


if __name__ == "__main__":
    from playground.console.script import run_lesson

    run_lesson("ladder")
