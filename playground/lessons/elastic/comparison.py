"""The last snapshots of two trainings that are to have ended with the same bits, compared byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from playground.measurement import Fields
from playground.runtime import PlaygroundError
from playground.survival.folder import find_snapshots
from playground.survival.snapshots import Snapshot, read_snapshot


def compare(rank: int, size: int, one: Path, other: Path) -> Fields:
    """How many `tensors` the last snapshots in two folders have, of how many bytes, and how many of these differ: every
    tensor that a rank would resume from, parameters, momentum, totals, random numbers. Raises `ValueError` if one has
    tensors that the other has not."""
    pairs = list(zip(tensors_in(read_last(one)), tensors_in(read_last(other)), strict=True))
    nbytes, differing = sum(first.nbytes for first, _ in pairs), sum(count_differing(*pair) for pair in pairs)
    return {"tensors": len(pairs), "nbytes": nbytes, "differing": differing}


def read_last(folder: Path) -> Snapshot:
    """The newest snapshot in `folder`. Raises `PlaygroundError` if there is none."""
    files = find_snapshots(folder)
    if not files:
        raise PlaygroundError(f"{folder} holds no snapshot: the training took none")
    return read_snapshot(files[0][1])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested structure, in its order; of a snapshot, what each rank resumes from."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Snapshot):
        value = [{**value.shared, **own} for own in value.own]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors differ: all, if they have not the same shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return max(one.nbytes, other.nbytes)
    first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return int((first != second).sum())
