"""Two gradient synchronisations beyond DistributedDataParallel, for CPUs: the optimizer's step on
one flat tensor, and zero-1 in memory that the ranks of one host share.

An optimizer steps for each parameter in turn, and what it does around the arithmetic takes longer
than that for a small model. Where the ranks share memory they need no replica each: the parameters
lie there once, and backward's gradients go where all ranks can read them. Each rank adds up its
shard of them, and steps for its shard of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms.messages import segment_of
from playground.algorithms.segment import Segment
from playground.algorithms.shared_memory import add_all, agree
from playground.training.averaging import AllReduceCall, views_of
from playground.training.sharding import FlatParameter
from playground.training.sync import SECOND_BACKWARD
from playground.training.zero_sync import ReplicatedSync


class FlatStep(ReplicatedSync):
    """The gradients of backward are new ones in each step: that is faster than to zero those before
    and add."""

    def zero_grad(self) -> None:
        for flat in self.flat_params:
            flat.shard.grad = None
            for param in flat.params:
                param.grad = None


class SharedFlatParameter(FlatParameter):
    """One whose parameters, and the gradients of all ranks, lie in `segment`."""

    def __init__(self, params: Sequence[nn.Parameter], segment: Segment) -> None:
        def new(numel: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
            return segment.allocate(numel, dtype, tensors=1)[0]

        super().__init__(params, segment.size, new)
        self.of_all = segment.allocate(len(self.data), self.data.dtype)
        """The gradients, by rank."""
        self.total = torch.empty_like(self.shard)
        """This rank's shard of their sum."""
        self.grad = self.of_all[segment.rank]
        self.views = views_of(self.grad[: self.numel], params)


class SharedStep(FlatStep):
    """zero-1 with such parameters: no messages, but two meetings in a step."""

    def __init__(self, model: nn.Module, segment: Segment) -> None:
        self.segment = segment
        self.shared = list[SharedFlatParameter]()
        self.are_read = False
        """Whether other ranks may still read this rank's gradients."""
        super().__init__(model)

    def flatten(self, params: Sequence[nn.Parameter]) -> FlatParameter:
        self.shared.append(SharedFlatParameter(params, self.segment))
        return self.shared[-1]

    def after_backward(self) -> None:
        for flat in self.shared:
            if flat.shard.grad is not None:
                raise RuntimeError(SECOND_BACKWARD)
            flat.flatten_grad()
        self.are_read = True
        self.segment.run(self.add_up)

    def add_up(self, segment: Segment) -> None:
        agree(segment, "step", self.shared[0].data)
        for flat in self.shared:
            add_all(
                torch.add, [flat.shard_of(gradients) for gradients in flat.of_all], out=flat.total
            )
            flat.shard.grad = flat.total

    def zero_grad(self) -> None:
        if self.are_read:  # their step was left out
            self.meet()
        super().zero_grad()

    def after_step(self, last: bool = False) -> None:
        self.meet()

    def meet(self) -> None:
        self.segment.run(Segment.meet)
        self.are_read = False


def new_shared_step(model: nn.Module, all_reduce: AllReduceCall = dist.all_reduce) -> FlatStep:
    """A `SharedStep` where all ranks share memory; otherwise a `FlatStep`."""
    segment = segment_of(dist.group.WORLD, next(model.parameters()).device)
    if isinstance(segment, Segment) and 1 < segment.size == dist.get_world_size():
        return SharedStep(model, segment)
    return FlatStep(model, all_reduce)
