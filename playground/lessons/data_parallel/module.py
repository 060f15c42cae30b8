"""data_parallel(): scatter, replicate, parallel_apply, gather. And the module that does it at each forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from playground.lessons.data_parallel.devices import Device, check_module_is_on, resolve_devices, resolve_output_device
from playground.lessons.data_parallel.gather import gather
from playground.lessons.data_parallel.parallel_apply import parallel_apply, use_device
from playground.lessons.data_parallel.replicate import replicate
from playground.lessons.data_parallel.scatter import scatter


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device],
    output_device: Device | None = None,
    dim: int = 0,
    kwargs: dict[str, object] | None = None,
) -> Any:
    """`module(*inputs, **kwargs)`, a part of the batch on each device; the outputs gathered on `output_device`, the
    first device if it is None. `inputs` that are no tuple are the only argument.

    Raises `UsageError` for devices that are not there or of two kinds, an output device outside the list, inputs
    without a batch dimension or of different batch sizes, and a module that lies elsewhere than on the first device.
    """
    resolved = resolve_devices(devices)
    output_device = resolve_output_device(output_device, resolved)
    outputs = run_replicas(module, inputs if isinstance(inputs, tuple) else (inputs,), kwargs or {}, resolved, dim)
    return outputs[0] if len(resolved) == 1 else gather(outputs, output_device, dim)


def run_replicas(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, object], devices: list[torch.device], dim: int
) -> list[Any]:
    """The output of each replica, where it was made."""
    parts = scatter((inputs, kwargs), devices, dim)
    if len(devices) == 1:
        check_module_is_on(module, devices[0])
        with use_device(devices[0]):
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
        self.devices = resolve_devices(devices)
        self.output_device = resolve_output_device(output_device, self.devices)
        check_module_is_on(module, self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return data_parallel(self.module, inputs, self.devices, self.output_device, self.dim, kwargs)
