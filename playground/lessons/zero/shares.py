"""Parameters in rows that N ranks can cut into equal shares, and the units of a model that are gathered as a whole."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from types import MethodWrapperType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from playground.lessons.ladder.lesson import views_of

ABOUT = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "__hash__", "numel",
    "size", "stride", "dim", "untyped_storage", "empty_like", "zeros_like", "new_empty", "new_zeros", "register_hook",
    "register_post_accumulate_grad_hook",
}  # fmt: skip
"""What can be asked of a parameter whose values are not here."""


class Freed(nn.Parameter):
    """The class of a parameter while its row is free. What reads or writes its values fetches the row before; all ranks
    must do so."""

    row: Row

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_property = isinstance(func, MethodWrapperType)  # then this is its __get__ or __set__
        if (func.__self__ if is_property else func).__name__ not in ABOUT:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Freed):
                    value.row.fetch()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        self.row.fetch()
        return copy.deepcopy(self, memo)


class Row:
    """Parameters of one type, one after the other in `values`, with zeros behind them, so that they make `cuts` equal
    shares. The optimizer gets `share`, this rank's, which is part of the same memory, in the parameters' place."""

    def __init__(self, params: Sequence[nn.Parameter], cuts: int) -> None:
        self.params, self.cuts, self.numel = params, cuts, sum(param.numel() for param in params)
        self.share_numel, self.rank = -(-self.numel // cuts), dist.get_rank() % cuts
        self.values = self.new_values()
        for param, view in views_of(self.values[: self.numel], params).items():
            view.copy_(param.detach())
            param.data = view
        self.share = nn.Parameter(self.cut(self.values))
        self.gathering: Any = None
        self.expect_gradients()

    def new_values(self) -> torch.Tensor:
        return self.params[0].detach().new_zeros(self.cuts * self.share_numel)

    def new_gradients(self) -> torch.Tensor:
        gradients = torch.empty_like(self.values)
        gradients[self.numel :].zero_()
        return gradients

    def cut(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's share of a row."""
        return row[self.rank * self.share_numel :][: self.share_numel]

    def expect_gradients(self) -> None:
        """Free the gradients, and expect those of the next backward."""
        self.gradients: Any = None
        self.views: dict[torch.Tensor, torch.Tensor] = {}
        self.missing: set[torch.Tensor] = set(self.params)  # those whose gradients are not complete

    def add(self, param: torch.Tensor) -> torch.Tensor:
        """Put this rank's part of the mean gradient of `param` into `gradients`: zero, if backward did not reach it."""
        if self.gradients is None:
            self.gradients = self.new_gradients()
            self.views = views_of(self.gradients[: self.numel], self.params)
        view = self.views[param]
        view.zero_() if param.grad is None else torch.mul(param.grad, 1 / dist.get_world_size(), out=view)
        return view

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters and of the share. Memory that is kept for them is zeroed."""
        self.share.grad = None
        for param in self.params:
            param.grad = self.views.get(param)
        if self.gradients is not None:
            self.gradients.zero_()

    @property
    def is_free(self) -> bool:
        """Whether the parameters are neither here nor on their way."""
        return not self.values.untyped_storage().nbytes()

    def gather(self) -> None:
        """Start to fetch the parameters from all ranks."""
        if self.is_free:
            self.values.untyped_storage().resize_(self.values.nbytes)
        self.gathering = dist.all_gather_into_tensor(self.values, self.share.detach(), async_op=True)

    def wait(self) -> None:
        """Until all parameters are here."""
        if self.gathering:
            self.gathering.wait()
            for param in self.params:
                param.__class__ = nn.Parameter
                vars(param).pop("row", None)
        self.gathering = None

    def fetch(self) -> None:
        """Have all parameters here."""
        if self.is_free:
            self.gather()
        self.wait()

    def keep(self) -> None:
        """Take what was written into the parameters, on every rank alike, as their values."""
        self.share.detach().copy_(self.cut(self.values))

    def free(self) -> None:
        """Give the memory of the parameters back. Whatever autograd has saved of them refers to `values`, too: it is
        there again after the next `gather`."""
        self.wait()
        for param in self.params:
            param.__class__, vars(param)["row"] = Freed, self
        self.values.untyped_storage().resize_(0)


def clip_grad_norm(rows: Sequence[Row], max_norm: float) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, by the norm of all ranks' shares together, which it returns. A row that
    is not cut is the same on all ranks, and counts once. All must call this, after backward."""
    norm = torch.stack([row.share.grad.square().sum() * row.cuts for row in rows]).sum() / dist.get_world_size()
    dist.all_reduce(norm)
    norm.sqrt_()
    for row in rows:
        row.share.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def units(model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The modules that are gathered as a whole, with their trainable parameters: the model's children. The model itself
    is the first, if it has parameters that are no child's, or several children's."""
    containers = (nn.ModuleList, nn.ModuleDict)  # never called themselves
    children = [
        part for child in model.children() for part in (child.children() if isinstance(child, containers) else [child])
    ]
    holders = Counter(param for child in children for param in child.parameters())
    found = [(child, [param for param in child.parameters() if holders[param] == 1]) for child in children]
    found = [(model, [param for param in model.parameters() if holders[param] != 1]), *found]
    trainable = [(module, [param for param in own if param.requires_grad]) for module, own in found]
    return [(module, own) for module, own in trainable if own]
