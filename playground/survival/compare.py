"""Two snapshots, byte by byte."""

from __future__ import annotations

from typing import Any

import torch

from playground.survival.comparison import Comparison
from playground.survival.folder import SnapshotFile
from playground.survival.snapshots import load


def compare(rank: int, size: int, one: SnapshotFile, other: SnapshotFile) -> Comparison:
    """Every tensor of two snapshots, of all ranks: parameters, momentum, totals, random numbers.

    Raises `ValueError` if one has tensors that the other has not.
    """
    tensors = nbytes = differing = 0
    for number in range(max(one.size, other.size)):
        mine, its = load(one, number), load(other, number)
        pairs = zip(tensors_in([mine.shared, mine.own]), tensors_in([its.shared, its.own]), strict=True)
        for first, second in pairs:
            tensors, nbytes = tensors + 1, nbytes + first.nbytes
            differing += count_differing(first, second)
    return Comparison(tensors=tensors, nbytes=nbytes, differing=differing)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested structure, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors differ: all, if they have not the same shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return max(one.nbytes, other.nbytes)
    return int((bytes_of(one) != bytes_of(other)).sum())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
