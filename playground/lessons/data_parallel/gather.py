"""Gather: the replicas' outputs together on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from playground.lessons.data_parallel.moves import Join


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """One output with the structure of each of `outputs`, its tensors joined along `dim` on `device`.

    Numbers (tensors without dimensions, as losses are) become a vector with one for each replica. Tuples (named ones
    too), lists and dicts are looked into; of None there is one. Of anything else there must be tensors inside.

    Raises `TypeError` for outputs that cannot be joined, `ValueError` for containers of different lengths or keys.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return Join.apply("gather", device, dim, *(each.reshape(1) if each.dim() == 0 else each for each in outputs))
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in outputs):
            raise ValueError("the replicas' outputs have different keys: they cannot be joined")
        return type(first)((key, gather([each[key] for each in outputs], device, dim)) for key in first)
    if isinstance(first, (tuple, list)):
        make = getattr(type(first), "_make", type(first))
        return make(gather(each, device, dim) for each in zip(*outputs, strict=True))
    raise TypeError(f"an output of type {type(first).__name__} cannot be joined: return tensors, or containers of them")
