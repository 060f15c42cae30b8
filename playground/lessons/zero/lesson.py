"""From DDP to FSDP in three steps: what a rank need not hold, and what is sent instead.

    python -m playground zero -n 4 --layers 6

An all-reduce is a reduce-scatter and an all-gather. With the optimizer's step between these two, a rank steps for its
share of the parameters alone: then it needs its share of the optimizer's state (zero-1), of the gradients (zero-2)
and, but for the layer at work, of the parameters (zero-3, which is FSDP). All train to the same numbers.
Source: Rajbhandari et al., ZeRO, 2020, arXiv 1910.02054; Zhao et al., PyTorch FSDP, 2023, arXiv 2304.11277
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.ladder.lesson import buckets, trainable_parameters
from playground.lessons.zero.shares import Row, units
from playground.training.sync import AllReduce, GradSync, pausing

SECOND = "a second backward before zero_grad: put the first one under no_sync"


class DDP(GradSync):
    """Every rank holds everything: all-reduce the gradients, step for all parameters."""

    def __init__(self, model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
        super().__init__(model)
        self.all_reduce, self.rows = all_reduce, [self.new_row(params) for params in self.parts()]

    def new_row(self, params: Sequence[nn.Parameter]) -> Row:
        return Row(params, cuts=1)

    def parts(self) -> Iterable[list[nn.Parameter]]:
        """The parameters of each row: all of one type."""
        return buckets(trainable_parameters(self.model))

    def optimized(self) -> list[nn.Parameter]:
        """For an optimizer that computes element by element, as SGD and Adam do: it sees shares, not matrices."""
        return [row.share for row in self.rows]

    def after_backward(self) -> None:
        for row in self.rows:
            for param in row.params:
                param.grad = row.add(param)
            self.all_reduce(row.gradients)
            row.share.grad = row.gradients

    def zero_grad(self) -> None:
        for row in self.rows:
            row.zero_grad()


class Zero1(DDP):
    """The optimizer's state in shares: reduce-scatter the gradients, step for this rank's share, all-gather."""

    def new_row(self, params: Sequence[nn.Parameter]) -> Row:
        return Row(params, dist.get_world_size())

    def after_backward(self) -> None:
        for row in self.rows:
            if row.share.grad is not None:
                raise RuntimeError(SECOND)
            for param in row.params:
                param.grad = row.add(param)
            mine = row.cut(row.gradients)
            dist.reduce_scatter_tensor(mine, row.gradients)
            row.share.grad = mine

    def after_step(self, last: bool) -> None:
        for row in self.rows:
            row.gather()
        for row in self.rows:
            row.wait()


class Zero2(Zero1):
    """And gradients: a layer's go to their owners as soon as backward has them, and are freed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.is_syncing, self.has_begun, self.waiting, self.reducing = True, False, self.rows[:], list[Any]()
        for row in self.rows:
            for param in row.params:
                param.register_post_accumulate_grad_hook(partial(self.collect, row))

    def parts(self) -> Iterable[list[nn.Parameter]]:
        """Backward's order: the last layers first."""
        return [params for _, own in units(self.model)[::-1] for params in buckets(own)]

    def collect(self, row: Row, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        if self.is_syncing:
            if row not in self.waiting:
                raise RuntimeError(SECOND)
            self.has_begun = True
            row.missing.discard(param)
            while self.waiting and not self.waiting[0].missing:  # in one order on all ranks
                self.reduce(self.waiting.pop(0))

    def reduce(self, row: Row) -> None:
        """Start the reduce-scatter of a row, when the one before is done."""
        self.finish()
        for param in row.params:
            row.add(param)
            param.grad = None
        mine = row.gradients.new_empty(row.share_numel)
        self.reducing = [(row, mine, dist.reduce_scatter_tensor(mine, row.gradients, async_op=True))]

    def finish(self) -> None:
        for row, mine, work in self.reducing:
            work.wait()
            row.share.grad = mine if row.share.grad is None else row.share.grad + mine
            row.expect_gradients()
        self.reducing = []

    def after_backward(self) -> None:
        for row in self.waiting:  # where backward has not been on this rank
            self.reduce(row)
        self.finish()
        self.waiting, self.has_begun = self.rows[:], False

    def zero_grad(self) -> None:
        """What a backward that raised has begun is completed: the other ranks' may have come further."""
        if self.has_begun:
            self.after_backward()
        super().zero_grad()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return pausing(self)


class Zero3(Zero2):
    """And parameters: a layer's are gathered when forward comes to it, freed, and gathered again for backward; those of
    the next layer are on their way meanwhile. All ranks must run the same layers in the same order.

    Between two steps a row holds what was gathered after the last one, or nothing. A forward that backward repeats, for
    activation checkpointing, fetches its own layer alone, and leaves it to backward to free."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        rows = {row.params[0]: row for row in self.rows}
        self.units = [[rows[params[0]] for params in buckets(own)] for _, own in units(model)]
        for number, (module, _) in enumerate(units(model)):
            module.register_forward_pre_hook(lambda *_, number=number: self.gather(number, number + is_forward()))
            module.register_forward_hook(lambda module, *_, number=number: self.free(number, module.training))
            module.register_full_backward_pre_hook(lambda *_, number=number: self.gather(number, number - 1))
        for row in self.rows:
            row.share = nn.Parameter(row.share.detach().clone())
            row.free()
        for module in model.modules():
            module.register_state_dict_post_hook(copy_values)
            module.register_load_state_dict_post_hook(self.keep_values)

    def gather(self, number: int, following: int) -> None:
        """Fetch a unit's parameters, start to fetch the following unit's, and wait for the first."""
        for each in (number, following):
            for row in self.units[each] if 0 <= each < len(self.units) else ():
                if row.is_free:
                    row.gather()
        for row in self.units[number]:
            row.wait()

    def free(self, number: int, is_training: bool) -> None:
        for row in self.units[number] if is_training and is_forward() else ():  # a test may keep all
            row.free()

    def keep_values(self, *_: object) -> None:
        """What `load_state_dict` has written is for the owners, too."""
        for row in self.rows:
            if not row.is_free:
                row.keep()

    def reduce(self, row: Row) -> None:
        row.free()
        super().reduce(row)

    def after_step(self, last: bool) -> None:
        for row in self.rows:
            row.free()  # whatever was gathered is of before the step
            if last:
                row.gather()
        for row in self.rows:
            row.wait()


def copy_values(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
    """What is in a state dict stays when the parameters are freed."""
    for name in module._parameters:
        if (value := state.get(prefix + name)) is not None and not value.requires_grad:
            state[prefix + name] = value.clone()


def is_forward() -> bool:
    """Whether this is not within a backward, where activation checkpointing repeats forward."""
    return torch._C._current_graph_task_id() == -1


WAYS = {"ddp": DDP, "zero-1": Zero1, "zero-2": Zero2, "zero-3": Zero3}


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
