"""The last snapshots of two trainings that are to have ended with the same bits, compared byte by
byte."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from playground.checkpoint.folder import find_snapshots
from playground.checkpoint.snapshots import read_snapshot
from playground.lessons.elastic.page import Comparison
from playground.runtime import PlaygroundError

BOARD_FILE = "snapshot.pt"
"""Name of the board's snapshot in a folder."""


def compare(rank: int, size: int, one: Path, other: Path) -> Comparison:
    """Compare the last snapshots in two folders: every tensor that a rank would resume from,
    parameters, momentum, totals, random numbers. Raises `ValueError` if one has tensors that the
    other has not."""
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    nbytes = sum(first.nbytes for first, _ in pairs)
    differing = sum(count_differing(*pair) for pair in pairs)
    return Comparison(tensors=len(pairs), nbytes=nbytes, differing=differing)


def tensors_in(folder: Path) -> list[torch.Tensor]:
    """All tensors that each rank resumes from, in the newest snapshot. Raises `PlaygroundError` if
    there is none."""
    file = folder / BOARD_FILE
    if file.exists():
        state = torch.load(file, map_location="cpu", weights_only=True)
        shared, owns = state, state.pop("own")
    elif files := find_snapshots(folder):
        snapshot = read_snapshot(files[0][1])
        shared, owns = snapshot.shared, snapshot.own
    else:
        raise PlaygroundError(f"{folder} holds no snapshot: the training took none")
    leaves = tree_leaves([{**shared, **own} for own in owns])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def count_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many bytes of two tensors differ: all, if they have not the same shape and type."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return max(one.nbytes, other.nbytes)
    first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return int((first != second).sum())
