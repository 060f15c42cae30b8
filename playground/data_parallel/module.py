"""data_parallel(): scatter, replicate, parallel_apply, gather. And the module that does it at each forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from playground.data_parallel.devices import Device, check_home, known, one_of
from playground.data_parallel.gather import gather
from playground.data_parallel.parallel_apply import on, parallel_apply
from playground.data_parallel.replicate import replicate
from playground.data_parallel.scatter import scatter


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device],
    output_device: Device | None = None,
    dim: int = 0,
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`module(*inputs, **kwargs)`, a part of the batch on each device; the outputs gathered on `output_device`, the
    first device if it is None. `inputs` that are no tuple are the only argument.

    Raises `Impossible` for devices that are not there or of two kinds, an output device outside the list, inputs
    without a batch dimension or of different batch sizes, and a module that lies elsewhere than on the first device.
    """
    found = known(devices)
    output_device = one_of(output_device, found)
    outputs = on_each(module, inputs if isinstance(inputs, tuple) else (inputs,), kwargs or {}, found, dim)
    return outputs[0] if len(found) == 1 else gather(outputs, output_device, dim)


def on_each(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: list[torch.device], dim: int
) -> list[Any]:
    """The output of each replica, where it was made."""
    parts = scatter((inputs, kwargs), devices, dim)
    if len(devices) == 1:
        check_home(module, devices[0])
        with on(devices[0]):
            return [module(*parts[0][0], **parts[0][1])]
    used = devices[: len(parts)]
    return parallel_apply(replicate(module, used), [part[0] for part in parts], [part[1] for part in parts], used)


class DataParallel(nn.Module):
    """`module`, each forward shared out over `devices` as `data_parallel` does it. It takes and raises the same."""

    def __init__(
        self, module: nn.Module, devices: Sequence[Device], output_device: Device | None = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = known(devices)
        self.output_device = one_of(output_device, self.devices)
        check_home(module, self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return data_parallel(self.module, inputs, self.devices, self.output_device, self.dim, kwargs)
