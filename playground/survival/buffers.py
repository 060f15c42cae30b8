"""Copies of a state that training may go on changing, as JSON and one block of memory that is allocated once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from playground.runtime.errors import UsageError

Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead to a value."""
Layout: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A tensor's dtype, shape, strides, and the offset of its bytes in the memory."""
PLAIN = (str, int, float, bool, type(None))
"""Types of values that JSON keeps as they are."""
ALIGNMENT = 64


@dataclass(frozen=True)
class Copy:
    """A state: `plain` is JSON data, with layouts in the place of tensors, and `memory` holds their bytes."""

    plain: object
    memory: torch.Tensor

    def encode(self) -> bytes:
        """`plain` as a line of JSON."""
        return json.dumps(self.plain).encode() + b"\n"


class Buffers:
    """Memory on the CPU for one state at a time. A second `fill` with tensors of the same shapes allocates nothing."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.layouts: list[Layout] = []
        self.views: list[torch.Tensor] = []

    @torch.no_grad()
    def fill(self, state: Mapping[str, object]) -> Copy:
        """A copy of `state` whose tensors lie in this memory, until the next `fill`.

        When it returns, tensors may be changed, also those of a GPU. Raises `TypeError` for anything but tensors,
        numbers, strings, and dicts, lists and tuples of them.
        """
        walk = Walk()
        plain = walk.describe(state, ())
        if walk.layouts != self.layouts:
            self.arrange(walk)
        for view, tensor in zip(self.views, walk.tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in walk.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Copy(plain, self.memory)

    def arrange(self, walk: Walk) -> None:
        """Have memory and views for other tensors than last time."""
        self.layouts = []  # if there is too little memory, the next state is not taken for the one before
        if walk.nbytes != len(self.memory):
            is_cuda = any(tensor.is_cuda for tensor in walk.tensors)
            self.memory = torch.empty(walk.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.views = [view(self.memory, layout) for layout in walk.layouts]
        self.layouts = walk.layouts


class Walk:
    """Through a state, to find its tensors and to describe the rest."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.layouts: list[Layout] = []
        self.nbytes = 0

    def describe(self, value: object, path: Path) -> object:
        """`value` as JSON data. What JSON has not is an object with its type as the only key."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return {"tensor": self.add(value)}
        if isinstance(value, Mapping):
            items = [(self.describe(key, path), self.describe(each, (*path, key))) for key, each in value.items()]
            return {"dict": items}
        if isinstance(value, (list, tuple)):
            several = [self.describe(each, (*path, index)) for index, each in enumerate(value)]
            return several if isinstance(value, list) else {"tuple": several}
        where = ".".join(map(str, path))
        raise TypeError(f"a snapshot cannot hold {where}, a {type(value).__name__}: make a tensor or a number of it")

    def add(self, tensor: torch.Tensor) -> Layout:
        strides = tensor.stride()
        if not tensor.is_contiguous():  # those of a tensor that is a part of another leave gaps
            strides = torch.empty_like(tensor, device="meta").stride()
        layout = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides, self.nbytes)
        self.tensors.append(tensor)
        self.layouts.append(layout)
        self.nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return layout


def view(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor that lies there in the memory. Raises `UsageError` for a dtype that this version of torch has not."""
    name, shape, strides, offset = layout
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"a snapshot holds a tensor of {name}, which this torch has not: go on with the one it is of")
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).as_strided(shape, strides)


def restore(plain: Any, memory: torch.Tensor) -> Any:
    """The state that `fill` has described so. Its tensors have memory of their own."""
    if isinstance(plain, list):
        return [restore(each, memory) for each in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "tensor":
        return view(memory, content).clone()
    if kind == "tuple":
        return tuple(restore(each, memory) for each in content)
    return {restore(key, memory): restore(each, memory) for key, each in content}
