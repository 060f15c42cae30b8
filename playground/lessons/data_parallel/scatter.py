"""Scatter: a chunk of the batch for each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from playground.lessons.data_parallel.moves import Split
from playground.runtime.errors import UsageError


def chunk_sizes(batch: int, devices: int) -> list[int]:
    """How many samples each device gets, as `torch.chunk` cuts: all the same, the last one what is left.

    Too few samples for all the devices leave some without a chunk: then fewer replicas run.

    >>> chunk_sizes(30, 3), chunk_sizes(10, 4), chunk_sizes(5, 4), chunk_sizes(0, 4)
    ([10, 10, 10], [3, 3, 3, 1], [2, 2, 1], [0])
    """
    most = -(-batch // devices)
    return [min(most, batch - start) for start in range(0, batch, most)] if batch else [0]


def scatter(inputs: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """`inputs` for each device that gets a chunk: the same structure, its tensors cut along `dim`.

    Tuples (named ones too), lists and dicts are looked into; anything else goes to every device as it is. Without a
    tensor there is nothing to share out: only the first device gets something.

    Raises `UsageError` for tensors without that dimension, or whose sizes in it differ.
    """
    sizes = chunk_sizes(batch_size(inputs, dim), len(devices))
    return spread(inputs, list(devices[: len(sizes)]), sizes, dim)


def batch_size(inputs: Any, dim: int = 0) -> int:
    """The size that all tensors in `inputs` have in `dim`; 0 if there is no tensor."""
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


def spread(value: Any, devices: list[torch.device], sizes: list[int], dim: int) -> list[Any]:
    """What each device gets of `value`."""
    if isinstance(value, torch.Tensor):
        return list(Split.apply("scatter", value, devices, sizes, dim))
    if isinstance(value, dict):
        parts = [spread(item, devices, sizes, dim) for item in value.values()]
        return [type(value)(zip(value, part, strict=True)) for part in transpose(parts, devices)]
    if isinstance(value, (tuple, list)):
        parts = [spread(item, devices, sizes, dim) for item in value]
        make = getattr(type(value), "_make", type(value))
        return [make(part) for part in transpose(parts, devices)]
    return [value] * len(devices)


def transpose(parts: list[list[Any]], devices: list[torch.device]) -> list[tuple[Any, ...]]:
    """From what each item gives every device, what each device gets of every item."""
    return [tuple(part[number] for part in parts) for number in range(len(devices))]
