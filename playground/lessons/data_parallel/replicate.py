"""Replicate: a copy of the module on each device, made anew for every forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from playground.lessons.data_parallel.devices import check_module_is_on
from playground.lessons.data_parallel.moves import Broadcast, copy_to


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A replica of `module` on each of `devices`, the first of which is where it lies.

    A replica's parameters are no leaves: what reaches them in backward goes on to the one original, where it is added
    up. The first replica has the parameters themselves, and the module's own buffers: what it changes in them in place
    (the running statistics of BatchNorm) stays, what the others change is lost.

    Raises `UsageError` for a module that lies elsewhere.
    """
    check_module_is_on(module, devices[0])
    copies = {parameter: Broadcast.apply(parameter, devices) for parameter in module.parameters()}
    buffers = {buffer: copy_buffer(buffer, devices) for buffer in module.buffers()}
    replicas = {each: [copy_shallowly(each) for _ in devices] for each in module.modules()}
    for each, its_replicas in replicas.items():
        for number, replica in enumerate(its_replicas):
            for name, child in each._modules.items():
                replica._modules[name] = None if child is None else replicas[child][number]
            for name, parameter in each._parameters.items():
                setattr(replica, name, None if parameter is None else copies[parameter][number])
            for name, buffer in each._buffers.items():
                replica._buffers[name] = None if buffer is None else buffers[buffer][number]
    return replicas[module]


def copy_shallowly(module: nn.Module) -> nn.Module:
    """A shallow copy, as the module itself wants it made: recurrent ones keep a list of their parameters besides."""
    return module._replicate_for_data_parallel()


def copy_buffer(buffer: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """The buffer itself, and copies of it; these take part in backward only if it does."""
    if buffer.requires_grad:
        return Broadcast.apply(buffer, devices)
    return buffer, *(copy_to(buffer, device, "replicate") for device in devices[1:])
