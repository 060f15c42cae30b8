"""Copies of a state that training may go on changing: into memory that is allocated once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead to a value."""
PLAIN = (bool, int, float, str, type(None))
"""Types of values that are taken as they are; `torch.load(weights_only=True)` knows them."""


class Buffers:
    """Memory on the CPU for one state at a time. A second `fill` with tensors of the same shapes allocates nothing."""

    def __init__(self) -> None:
        self.tensors: dict[Path, torch.Tensor] = {}
        self.devices: set[torch.device] = set()

    def fill(self, state: Mapping[str, object]) -> dict[str, object]:
        """A copy of `state` whose tensors lie in this memory, until the next `fill`.

        When it returns, tensors may be changed, also those of a GPU. Raises `TypeError` for what cannot be loaded
        again by `torch.load(weights_only=True)`: anything but tensors, numbers, strings, and dicts, lists and tuples
        of them.
        """
        self.previous, self.tensors = self.tensors, {}
        copy = {name: self.copy(value, (name,)) for name, value in state.items()}
        self.previous = {}
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()
        self.devices.clear()
        return copy

    def copy(self, value: object, path: Path) -> object:
        if isinstance(value, torch.Tensor):
            return self.copy_tensor(value.detach(), path)
        if isinstance(value, Mapping):
            return {key: self.copy(each, (*path, key)) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            several = [self.copy(each, (*path, index)) for index, each in enumerate(value)]
            return several if isinstance(value, list) else tuple(several)
        if type(value) in PLAIN:
            return value
        where = ".".join(map(str, path))
        raise TypeError(f"a snapshot cannot hold {where}, a {type(value).__name__}: make a tensor or a number of it")

    def copy_tensor(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        buffer = self.previous.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self.devices.add(tensor.device)
        self.tensors[path] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return buffer
