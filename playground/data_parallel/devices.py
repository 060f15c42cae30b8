"""Which devices there are, and whether a module is where it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn

from playground.data_parallel.memory import HOST, home
from playground.runtime.errors import Impossible

Device: TypeAlias = "torch.device | str"
KINDS = ("cpu", "cuda")


def known(devices: Sequence[Device]) -> list[torch.device]:
    """The devices that are meant. Raises `Impossible` for none, for unknown and for absent ones, for two kinds."""
    if not devices:
        raise Impossible("no devices: name at least one, as in cpu:0,cpu:1")
    found = [known_device(device) for device in devices]
    if len({device.type for device in found}) > 1:
        raise Impossible(f"devices {listed(found)}: all of one kind, either cpu:… or cuda:…")
    return found


def known_device(device: Device) -> torch.device:
    """One of them, with its number."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise Impossible(f"device {device!r} is unknown: write cpu:0, cpu:1, … or cuda:0, cuda:1, …") from None
    if found.type not in KINDS:
        raise Impossible(f"device {found} is neither cpu nor cuda: write cpu:0, cpu:1, … or cuda:0, cuda:1, …")
    found = torch.device(found.type, found.index or 0)
    if found.type == "cuda" and found.index >= torch.cuda.device_count():
        raise Impossible(f"device {found} is absent, this machine shows {torch.cuda.device_count()} GPUs: use cpu:0, …")
    return found


def one_of(output_device: Device | None, devices: list[torch.device]) -> torch.device:
    """Where outputs are gathered: the first device unless another of the list is named. Raises `Impossible`."""
    if output_device is None:
        return devices[0]
    found = known_device(output_device)
    if found not in devices:
        raise Impossible(f"output device {found} is none of the devices {listed(devices)}: choose one of them")
    return found


def check_home(module: nn.Module, device: torch.device) -> None:
    """Raise `Impossible` if a parameter or buffer of `module` is not on `device`, from where it is to be copied."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        there = home(tensor)
        if there != device and not (there == HOST and device.type == "cpu"):
            raise Impossible(
                f"{name} of {type(module).__name__} is on {there}: a module is copied from the first device, "
                f"so move it to {device} before"
            )


def listed(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))
