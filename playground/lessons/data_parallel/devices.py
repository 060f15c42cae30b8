"""Which devices there are, and whether a module is where it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn

from playground.lessons.data_parallel.account import HOST
from playground.lessons.data_parallel.memory import device_of
from playground.runtime.errors import UsageError

Device: TypeAlias = "torch.device | str"
DEVICE_TYPES = ("cpu", "cuda")


def resolve_devices(devices: Sequence[Device]) -> list[torch.device]:
    """The devices of these names, numbered. Raises `UsageError` for none, for unknown or absent ones, for two kinds."""
    if not devices:
        raise UsageError("no devices: name at least one, as in cpu:0,cpu:1")
    resolved = [resolve_device(device) for device in devices]
    if len({device.type for device in resolved}) > 1:
        raise UsageError(f"devices {join_names(resolved)}: all of one kind, either cpu:… or cuda:…")
    return resolved


def resolve_device(device: Device) -> torch.device:
    """One of them: "cuda" is cuda:0."""
    try:
        resolved = torch.device(device)
        number = str(device).partition(":")[2]
        if number and int(number) != resolved.index:  # torch keeps 8 bits of it: cpu:256 would be cpu:0
            raise RuntimeError
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown: write cpu:0, cpu:1, … or cuda:0, cuda:1, …") from None
    if resolved.type not in DEVICE_TYPES:
        raise UsageError(f"device {resolved} is neither cpu nor cuda: write cpu:0, cpu:1, … or cuda:0, cuda:1, …")
    resolved = torch.device(resolved.type, resolved.index or 0)
    if resolved.type == "cuda" and resolved.index >= torch.cuda.device_count():
        raise UsageError(
            f"device {resolved} is absent, this machine shows {torch.cuda.device_count()} GPUs: use cpu:0, …"
        )
    return resolved


def resolve_output_device(output_device: Device | None, devices: list[torch.device]) -> torch.device:
    """Where outputs are gathered: the first device unless another of the list is named. Raises `UsageError`."""
    if output_device is None:
        return devices[0]
    resolved = resolve_device(output_device)
    if resolved not in devices:
        raise UsageError(f"output device {resolved} is none of the devices {join_names(devices)}: choose one of them")
    return resolved


def check_module_is_on(module: nn.Module, device: torch.device) -> None:
    """Raise `UsageError` if a parameter or buffer of `module` is not on `device`, from which it is to be copied."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        there = device_of(tensor)
        if there != device and not (there == HOST and device.type == "cpu"):
            raise UsageError(
                f"{name} of {type(module).__name__} is on {there}: a module is copied from the first device, "
                f"so move it to {device} before"
            )


def join_names(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))
