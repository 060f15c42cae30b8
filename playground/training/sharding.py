"""ZeRO for any training: what a rank need not hold, and what is sent instead.

As the program of zero does it, and besides: several dtypes, units that are not used, gradients that
add up, and a unit that is gathered while the one before computes. A test holds both equal to one
process. Sources: Rajbhandari et al., ZeRO, 2020, arXiv 1910.02054; Zhao et al.,
FSDP, 2023, arXiv 2304.11277
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.algorithms.traffic import Traffic
from playground.tap import observing
from playground.training.averaging import buckets, trainable_parameters, views_of


class FlatParameter:
    """Parameters of one dtype in one tensor, `data`, padded with zeros to a multiple of `shards`.

    The optimizer steps for this rank's `shard`: it must compute element by element, as Adam does.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        shards: int,
        new: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:
        self.params = params
        self.shards = shards
        self.numel = sum(param.numel() for param in params)
        padded = -(-self.numel // shards) * shards
        self.data = new(padded, dtype=params[0].dtype, device=params[0].device)
        for param, view in views_of(self.data[: self.numel], params).items():
            view.copy_(param.detach())
            param.data = view
        self.shard = nn.Parameter(self.shard_of(self.data))
        self.gathering: Any = None  # the all-gather that is under way
        self.expect_grad()

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(self.shards)[dist.get_rank() % self.shards]

    def expect_grad(self) -> None:
        """Free the gradient, and expect that of the next backward."""
        self.grad: Any = None
        self.views: dict[torch.Tensor, torch.Tensor] = {}
        self.missing: set[torch.Tensor] = set(self.params)  # those whose gradients are not complete

    def flatten_grad(self) -> torch.Tensor:
        """Leave in `grad` this rank's part of the mean gradient: zero where backward left None."""
        if self.grad is None:
            self.grad = torch.empty_like(self.data)
            self.grad[self.numel :].zero_()
            self.views = views_of(self.grad[: self.numel], self.params)
        for param, view in self.views.items():
            if param.grad is None:
                view.zero_()
            else:
                torch.mul(param.grad, 1 / dist.get_world_size(), out=view)
            param.grad = view
        return self.grad

    def gather(self) -> None:
        """Start to gather the shards of all ranks into `data`."""
        if self.is_free:
            self.data.untyped_storage().resize_(self.data.nbytes)
        self.gathering = dist.all_gather_into_tensor(self.data, self.shard.detach(), async_op=True)

    def wait(self) -> None:
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Free the parameters' memory. What autograd has saved of them is a view of it, too."""
        self.wait()
        self.data.untyped_storage().resize_(0)

    @property
    def is_free(self) -> bool:
        return not self.data.untyped_storage().nbytes()


class Replicated:
    """DDP: every rank holds everything. All-reduce the gradients, step for all parameters."""

    def __init__(
        self, model: nn.Module, all_reduce: Callable[..., object] = dist.all_reduce
    ) -> None:
        self.model = model
        self.all_reduce = all_reduce
        self.flat_params = [self.flatten(params) for _, params in self.units()]

    def units(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        return [(self.model, params) for params in buckets(trainable_parameters(self.model))]

    def flatten(self, params: Sequence[nn.Parameter]) -> FlatParameter:
        return FlatParameter(params, shards=1)

    def shards(self) -> list[nn.Parameter]:
        return [flat.shard for flat in self.flat_params]

    def zero_grad(self) -> None:
        for flat in self.flat_params:
            flat.shard.grad = None
            for param in flat.params:
                param.grad = flat.views.get(param)  # if there is one, backward adds to it
            if flat.grad is not None:
                flat.grad.zero_()

    def after_backward(self) -> None:
        for flat in self.flat_params:
            flat.shard.grad = flat.flatten_grad()
            self.all_reduce(flat.shard.grad)

    def after_step(self, last: bool = False) -> None:
        """After the optimizer's step. The `last` one leaves all parameters on every rank."""


class Zero1(Replicated):
    """Shard the optimizer's state: reduce-scatter the gradients, step for a shard, all-gather."""

    def flatten(self, params: Sequence[nn.Parameter]) -> FlatParameter:
        return FlatParameter(params, shards=dist.get_world_size())

    def after_backward(self) -> None:
        for flat in self.flat_params:
            grad = flat.flatten_grad()
            flat.shard.grad = flat.shard_of(grad)
            dist.reduce_scatter_tensor(flat.shard.grad, grad)

    def after_step(self, last: bool = False) -> None:
        for flat in self.flat_params:
            flat.gather()
        for flat in self.flat_params:
            flat.wait()


class Zero2(Zero1):
    """Shard the gradients too: during backward, reduce a unit's to their owners and free them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        owned = Counter(param for flat in self.flat_params for param in flat.params)
        if owned != Counter(trainable_parameters(model)):
            raise ValueError("each parameter must belong to exactly one child of the model")
        self.waiting = self.flat_params[::-1]  # backward comes to the last units first
        self.reducing: Any = None  # the reduce-scatter that is under way
        for flat in self.flat_params:
            for param in flat.params:
                param.register_post_accumulate_grad_hook(partial(self.collect, flat))

    def units(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        """The model's children. Each parameter must belong to exactly one of them."""
        trained = [(child, trainable_parameters(child)) for child in self.model.children()]
        return [(child, params) for child, own in trained for params in buckets(own)]

    def collect(self, flat: FlatParameter, param: torch.Tensor) -> None:
        """Called by backward when `param.grad` is complete."""
        flat.missing.discard(param)
        while self.waiting and not self.waiting[0].missing:  # in one order on all ranks
            self.reduce(self.waiting.pop(0))

    def reduce(self, flat: FlatParameter) -> None:
        """Start the reduce-scatter of a gradient, when the one before is done and freed."""
        self.finish()
        grad = flat.flatten_grad()
        for param in flat.params:
            param.grad = None
        shard = grad.new_empty(flat.shard.shape)
        self.reducing = flat, shard, dist.reduce_scatter_tensor(shard, grad, async_op=True)

    def finish(self) -> None:
        if self.reducing:
            flat, shard, work = self.reducing
            work.wait()
            flat.shard.grad = shard if flat.shard.grad is None else flat.shard.grad + shard
            flat.expect_grad()
            self.reducing = None

    def after_backward(self) -> None:
        for flat in self.waiting:  # units that backward did not reach on this rank
            self.reduce(flat)
        self.finish()
        self.waiting = self.flat_params[::-1]


class Zero3(Zero2):
    """Shard the parameters too: gather a unit's for its forward and its backward, then free them.

    The next unit's are on their way meanwhile. All ranks must run the same units in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # torch 2.13 alone warns of a module whose inputs need no gradients, as an embedding's
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        for index, (module, _) in enumerate(self.units()):
            module.register_forward_pre_hook(lambda *_, i=index: self.gather(i, i + 1))
            module.register_forward_hook(lambda *_, i=index: self.free(i))
            module.register_full_backward_pre_hook(lambda *_, i=index: self.gather(i, i - 1))
        for flat in self.flat_params:
            flat.shard = nn.Parameter(flat.shard.detach().clone())  # it was a view of `data`
            flat.free()

    def gather(self, index: int, following: int) -> None:
        """Gather a unit's parameters, and start to gather those of the following unit."""
        for each in (index, following):
            if 0 <= each < len(self.flat_params) and self.flat_params[each].is_free:
                self.flat_params[each].gather()
        self.flat_params[index].wait()

    def free(self, index: int) -> None:
        self.flat_params[index].free()

    def reduce(self, flat: FlatParameter) -> None:
        flat.free()
        super().reduce(flat)

    def after_step(self, last: bool = False) -> None:
        for flat in self.flat_params:
            flat.free()  # what was gathered is of before the step
        if last:
            super().after_step()


METHODS = {"ddp": Replicated, "zero-1": Zero1, "zero-2": Zero2, "zero-3": Zero3}


def bytes_held(method: Replicated, optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of parameters, gradients and optimizer's state. Memory that is shared counts once."""
    params = [*method.model.parameters(), *method.shards()]
    grads = [param.grad for param in params if param.grad is not None]
    state = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    storages = [{each.untyped_storage() for each in kind} for kind in (params, grads, state)]
    return [sum(storage.nbytes() for storage in kind) for kind in storages]


def train(method: Replicated, batches: torch.Tensor) -> list[float]:
    """Take a step of Adam for each batch. Returns the bytes held and sent in the first."""
    optimizer = torch.optim.Adam(method.shards())
    figures = []
    for index, batch in enumerate(batches, start=1):
        traffic = Traffic()
        with observing(traffic):
            method.zero_grad()
            method.model(batch).square().mean().backward()
            method.after_backward()
            optimizer.step()
            held = bytes_held(method, optimizer)
            method.after_step(last=index == len(batches))
        figures.append([*held, traffic.sent])
    return figures[0]
