"""Who is told which tensors move between devices, and whose work a thread does: the recorder, and
accounts of virtual devices. Without one, all tensors lie where torch has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

Moved = Sequence[tuple[torch.device, torch.Tensor]]
"""Tensors that are copied, each with the device where it lies."""


class DeviceObserver:
    """Is told what devices do, from `observing` on."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Where a tensor in CPU memory lies; None if this one does not tell."""

    def moving(self, part: str, moved: Moved, target: torch.device) -> AbstractContextManager[None]:
        """In this block, `part` of a training step copies these tensors to `target`."""
        return contextlib.nullcontext()

    def working_for(self, device: torch.device) -> AbstractContextManager[None]:
        """In this block, what this thread computes is `device`'s work."""
        return contextlib.nullcontext()


_observers: list[DeviceObserver] = []


@contextlib.contextmanager
def observing(observer: DeviceObserver) -> Iterator[None]:
    """Tell this observer in this block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies; the CPU for one in CPU memory that is not on a virtual device."""
    for each in reversed(_observers if tensor.device.type == "cpu" else []):
        if (device := each.device_of(tensor)) is not None:
            return device
    return tensor.device


@contextlib.contextmanager
def moving(part: str, target: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Tell that `part` of a training step copies `tensors` to `target`."""
    moved = [(device, each) for each in tensors if (device := device_of(each)) != target]
    with contextlib.ExitStack() as told:
        for each in _observers:
            told.enter_context(each.moving(part, moved, target))
        yield


@contextlib.contextmanager
def working_for(device: torch.device) -> Iterator[None]:
    """Tell that this thread does `device`'s work."""
    with contextlib.ExitStack() as told:
        for each in _observers:
            told.enter_context(each.working_for(device))
        yield
