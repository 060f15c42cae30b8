"""What is recorded of tensors: of small ones what they hold, of all how large they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from playground.see.record.layout import MAX_VALUES


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its elements; of a sparse tensor those of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else 0


def values_of(tensor: torch.Tensor) -> list[float] | None:
    """What it holds, flat; None if it is too large, or where to look would be to wait: on a GPU."""
    if tensor.numel() > MAX_VALUES or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    values: list[float] = tensor.tolist() if tensor.dim() == 1 else tensor.flatten().tolist()
    return values


def values_of_all(tensors: Sequence[torch.Tensor]) -> list[float] | None:
    """The same of several, one after the other."""
    if len(tensors) == 1:
        return values_of(tensors[0])
    if not tensors or sum(tensor.numel() for tensor in tensors) > MAX_VALUES:
        return None
    parts = [values_of(tensor) for tensor in tensors]
    return None if None in parts else [value for part in parts for value in part or ()]
