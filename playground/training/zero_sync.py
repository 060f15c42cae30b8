"""The methods of the lesson zero as gradient synchronisations, for any training: backwards may fail
or be repeated, steps be left out, ranks use different layers, modules share parameters, and whoever
reads a parameter that is freed gathers it."""

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

from playground.base.upstream import is_in_backward
from playground.training.averaging import buckets, trainable_parameters
from playground.training.sharding import FlatParameter, Replicated, Zero1, Zero2, Zero3
from playground.training.sync import SECOND_BACKWARD, GradSync, SyncInBackward


class ReplicatedSync(Replicated, GradSync):
    """The optimizer gets shards: it must compute element by element, as SGD and Adam do."""

    def optimized(self) -> list[nn.Parameter]:
        return self.shards()


class Zero1Sync(ReplicatedSync, Zero1):
    """Refuses a second backward."""

    def after_backward(self) -> None:
        if any(shard.grad is not None for shard in self.shards()):
            raise RuntimeError(SECOND_BACKWARD)
        super().after_backward()


class Zero2Sync(SyncInBackward, ReplicatedSync, Zero2):
    """Refuses a second backward, and completes a backward that raised."""

    def units(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        return [(module, params) for module, own in units(self.model) for params in buckets(own)]

    def collect(self, flat: FlatParameter, param: torch.Tensor) -> None:
        if flat not in self.waiting:
            raise RuntimeError(SECOND_BACKWARD)
        self.has_begun = True
        super().collect(flat, param)

    def after_backward(self) -> None:
        super().after_backward()
        self.has_begun = False


class Zero3Sync(Zero2Sync, Zero3):
    """A forward that backward repeats, for activation checkpointing, gathers its own unit alone,
    and leaves it to backward to free. Between two steps a unit holds what was gathered after the
    last one, or nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.modules = [module for module, _ in self.units()]
        for module in model.modules():
            module.register_state_dict_post_hook(copy_values)
            module.register_load_state_dict_post_hook(self.keep_values)

    def flatten(self, params: Sequence[nn.Parameter]) -> FlatParameter:
        return GatheredWhenRead(params, dist.get_world_size())

    def gather(self, index: int, following: int) -> None:
        is_repeated = following > index and is_in_backward()
        super().gather(index, index if is_repeated else following)

    def free(self, index: int) -> None:
        if self.modules[index].training and not is_in_backward():  # a test may keep all
            super().free(index)

    def keep_values(self, *_: object) -> None:
        """What `load_state_dict` has written, on every rank alike, is for the owners, too."""
        for flat in self.flat_params:
            if not flat.is_free:
                flat.shard.detach().copy_(flat.shard_of(flat.data))


SYNCS: dict[str, type[ReplicatedSync]] = {
    "ddp": ReplicatedSync, "zero-1": Zero1Sync, "zero-2": Zero2Sync, "zero-3": Zero3Sync,
}  # fmt: skip


def copy_values(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
    """What is in a state dict stays when the parameters are freed."""
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        if (value := state.get(prefix + name)) is not None and not value.requires_grad:
            state[prefix + name] = value.clone()


def units(model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The model's children with their trainable parameters, and of a list of modules its children.
    The model itself is the first, if it has parameters that are no child's, or several
    children's."""
    containers = (nn.ModuleList, nn.ModuleDict)  # never called themselves
    children = [
        part
        for child in model.children()
        for part in (child.children() if isinstance(child, containers) else [child])
    ]
    holders = Counter(param for child in children for param in child.parameters())
    found = [
        (child, [param for param in trainable_parameters(child) if holders[param] == 1])
        for child in children
    ]
    shared = [param for param in trainable_parameters(model) if holders[param] != 1]
    return [(module, own) for module, own in [(model, shared), *found] if own]


ABOUT = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn",
    "__hash__", "numel", "nbytes", "size", "stride", "dim", "untyped_storage", "empty_like",
    "zeros_like", "new_empty", "new_zeros", "register_hook", "register_post_accumulate_grad_hook",
}  # fmt: skip
"""What can be asked of a parameter whose values are not here."""


class Freed(nn.Parameter):
    """The class of a parameter while it is freed. What reads or writes its values gathers them
    before; all ranks must do so."""

    flat: GatheredWhenRead

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_property = isinstance(func, MethodWrapperType)  # then this is its __get__ or __set__
        if (func.__self__ if is_property else func).__name__ not in ABOUT:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Freed):
                    value.flat.fetch()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        self.flat.fetch()
        return copy.deepcopy(self, memo)


class GatheredWhenRead(FlatParameter):
    """Its parameters are `Freed` while they are not here."""

    def wait(self) -> None:
        if self.gathering:
            super().wait()
            for param in self.params:
                param.__class__ = nn.Parameter
                vars(param).pop("flat", None)

    def free(self) -> None:
        super().free()
        for param in self.params:
            param.__class__ = Freed
            vars(param)["flat"] = self

    def fetch(self) -> None:
        """Have all parameters here."""
        if self.is_free:
            self.gather()
        self.wait()
