"""Two rungs beyond DistributedDataParallel, for CPUs: the optimizer's step on one flat tensor, and zero-1 in memory
that the ranks of one host share.

An optimizer steps for each parameter in turn, and what it does around the arithmetic takes longer than that for a small
model. Where the ranks share memory they need no replica each: the parameters lie there once, and backward's gradients
go where all ranks can read them. Each rank adds up its share of them, and steps for its share of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms.messages import segment_of
from playground.algorithms.shared_memory import add_all, agree
from playground.lessons.zero.lesson import DDP, SECOND
from playground.lessons.zero.shares import Row
from playground.runtime.shared_memory import Segment
from playground.training.sync import AllReduce


class FlatStep(DDP):
    """The gradients of backward are new ones in each step: that is faster than to zero those before and add."""

    def zero_grad(self) -> None:
        for row in self.rows:
            row.share.grad = None
            for param in row.params:
                param.grad = None


class SharedRow(Row):
    """A row whose parameters, and the gradients of all ranks, lie in `segment`."""

    def __init__(self, params: Sequence[nn.Parameter], segment: Segment) -> None:
        self.segment = segment
        super().__init__(params, segment.size)
        self.of_all = segment.allocate(len(self.values), self.values.dtype)
        """The gradients, by rank."""
        self.total = torch.empty_like(self.share)
        """This rank's share of their sum."""

    def new_values(self) -> torch.Tensor:
        return self.segment.allocate(self.segment.size * self.share_numel, self.params[0].dtype, tensors=1)[0]

    def new_gradients(self) -> torch.Tensor:
        return self.of_all[self.segment.rank]


class SharedStep(FlatStep):
    """zero-1 with such rows: no messages, but two meetings in a step."""

    def __init__(self, model: nn.Module, segment: Segment) -> None:
        self.segment, self.shared = segment, list[SharedRow]()
        self.are_read = False
        """Whether other ranks may still read this rank's gradients."""
        super().__init__(model)

    def new_row(self, params: Sequence[nn.Parameter]) -> Row:
        self.shared.append(SharedRow(params, self.segment))
        return self.shared[-1]

    def after_backward(self) -> None:
        for row in self.rows:
            if row.share.grad is not None:
                raise RuntimeError(SECOND)
            for param in row.params:
                param.grad = row.add(param)
        self.are_read = True
        self.segment.run(self.add_up)

    def add_up(self, segment: Segment) -> None:
        agree(segment, "step", self.rows[0].values)
        for row in self.shared:
            add_all(torch.add, [row.cut(gradients) for gradients in row.of_all], out=row.total)
            row.share.grad = row.total

    def zero_grad(self) -> None:
        if self.are_read:  # their step was left out
            self.meet()
        super().zero_grad()

    def after_step(self, last: bool) -> None:
        self.meet()

    def meet(self) -> None:
        self.segment.run(Segment.meet)
        self.are_read = False


def new_shared_step(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> DDP:
    """A `SharedStep` where all ranks share memory; otherwise a `FlatStep`."""
    segment = segment_of(dist.group.WORLD, next(model.parameters()).device)
    if isinstance(segment, Segment) and 1 < segment.size == dist.get_world_size():
        return SharedStep(model, segment)
    return FlatStep(model, all_reduce)
