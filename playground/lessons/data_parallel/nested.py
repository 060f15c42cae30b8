"""Tensors in tuples (named ones too), lists and dicts: cut for every device, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from playground.runtime.errors import UsageError


def batch_size(inputs: Any, dim: int = 0) -> int:
    """The size that all tensors in `inputs` have in `dim`; 0 if there is no tensor.

    Raises `UsageError` for tensors without that dimension, or whose sizes in it differ.
    """
    tensors = list(tensors_in(inputs))
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise UsageError(
                f"an input of shape {list(tensor.shape)} has no batch dimension {dim}: "
                f"every tensor is cut along it, so give it one, or pass a number instead of a tensor"
            )
    sizes = [tensor.shape[dim] for tensor in tensors]
    if len(set(sizes)) > 1:
        raise UsageError(f"inputs of different batch sizes {', '.join(map(str, sizes))}: all must have the same")
    return sizes[0] if sizes else 0


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that `spread` cuts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def spread(value: Any, count: int, cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[Any]:
    """`count` values of the structure of `value`: each has one of the chunks that `cut` makes of every tensor."""
    if isinstance(value, torch.Tensor):
        return list(cut(value))
    if not isinstance(value, (dict, tuple, list)):
        return [value] * count
    parts = [spread(item, count, cut) for item in (value.values() if isinstance(value, dict) else value)]
    make = make_dict(value) if isinstance(value, dict) else getattr(type(value), "_make", type(value))
    return [make([part[number] for part in parts]) for number in range(count)]


def unite(values: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """One value of the structure of each of `values`, its tensors made of theirs by `join`. Of None there is one.

    Raises `TypeError` for what holds no tensors, `ValueError` for containers of different lengths or keys.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return join([each.reshape(1) if each.dim() == 0 else each for each in values])
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in values):
            raise ValueError("the replicas' outputs have different keys: they cannot be joined")
        return make_dict(first)([unite([each[key] for each in values], join) for key in first])
    if isinstance(first, (tuple, list)):
        make = getattr(type(first), "_make", type(first))
        return make(unite(each, join) for each in zip(*values, strict=True))
    raise TypeError(f"an output of type {type(first).__name__} cannot be joined: return tensors, or containers of them")


def make_dict(like: dict[Any, Any]) -> Callable[[Sequence[Any]], dict[Any, Any]]:
    """Makes a dict with the type and the keys of `like`, of values in their order."""
    return lambda values: type(like)(zip(like, values, strict=True))
