"""DataParallel by its parts: one process drives all devices, with a thread for each.

    python -m playground data-parallel
    python -m playground data-parallel --devices cpu:0,cpu:1 --gather logits

A forward pass of DataParallel is four calls, with torch's arguments:

    inputs = scatter(batch, [0, 1])
    replicas = replicate(module, [0, 1])
    outputs = parallel_apply(replicas, inputs)
    output = gather(outputs, 0)

Without GPUs the devices are virtual ones, `cpu:0` and on: each with its own thread and its own memory, and what moves
between them is copied. On GPUs the same code runs on the real ones: --devices cuda:0,cuda:1.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html and
https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from playground.lessons.data_parallel import machine
from playground.lessons.data_parallel.machine import Device, Devices, Join, copy_to, resolve_devices


def scatter(inputs: Any, devices: Devices, dim: int = 0) -> list[Any]:
    """`inputs` for each device that gets a chunk: the same structure, its tensors cut along `dim`. Tuples, lists and
    dicts are looked into; anything else goes to every device, or to the first alone if there is no tensor.
    """
    devices, (leaves, structure) = resolve_devices(devices), tree_flatten(inputs)
    batch = next((leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor)), 0)
    sizes = machine.chunk_sizes(batch, len(devices))
    used = devices[: len(sizes)]  # of fewer samples than devices some devices get none

    def cut(leaf: Any) -> list[Any]:
        if not isinstance(leaf, torch.Tensor):
            return [leaf] * len(used)
        return [copy_to(chunk, to, "scatter") for chunk, to in zip(leaf.split(sizes, dim), used, strict=True)]

    columns = list(map(cut, leaves))
    return [tree_unflatten([column[number] for column in columns], structure) for number in range(len(used))]


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """A replica of `module` on each of `devices`, the first of which is where it lies. Made again for every forward.

    A replica's parameters are no leaves: what reaches them in backward goes on to the one original, where it is added
    up. The first replica has the parameters themselves, and the module's own buffers: what it changes in them in place
    (the running statistics of BatchNorm) stays, what the others change is lost.
    """
    devices = resolve_devices(devices)
    tensors = (*module.parameters(), *module.buffers())
    copies: dict[Any, Any] = {each: machine.broadcast(each, devices) for each in tensors}
    copies |= {each: [each._replicate_for_data_parallel() for _ in devices] for each in module.modules()}
    for each in module.modules():
        parts = {**each._modules, **each._parameters, **each._buffers}
        for number, replica in enumerate(copies[each]):
            for name, part in parts.items():
                setattr(replica, name, None if part is None else copies[part][number])
    return copies[module]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, object]] | None = None,
    devices: Devices = None,
) -> list[Any]:
    """The results of `modules[i](*inputs[i], **kwargs_tup[i])` on `devices[i]`, by default where its input lies, for
    all i at once, each in its own thread. Raises `RuntimeError` for the first replica that failed, with its device.
    """
    used = machine.devices_of(inputs) if devices is None else resolve_devices(devices)
    work_as_caller = machine.capture_modes(used)

    def work(number: int) -> Any:
        arguments = inputs[number] if isinstance(inputs[number], tuple) else (inputs[number],)
        with work_as_caller(number):
            return modules[number](*arguments, **(kwargs_tup[number] if kwargs_tup else {}))

    with machine.threads(used) as threads:
        running = [thread.submit(work, number) for number, thread in enumerate(threads)]
        wait(running)
    for number, (device, future) in enumerate(zip(used, running, strict=True)):
        if error := future.exception():
            raise RuntimeError(f"replica {number} on {device}: {error}") from error
    return [future.result() for future in running]


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """One output with the structure of each of `outputs`, its tensors joined along `dim` on `device`. Numbers,
    as losses are, become a vector with one for each replica. Raises `TypeError` for what cannot be joined.
    """
    [target] = resolve_devices([device])

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], torch.Tensor):
            return Join.apply(target, dim, *(part.reshape(1) if part.dim() == 0 else part for part in parts))
        if parts[0] is not None:
            what = f"an output of type {type(parts[0]).__name__}"
            raise TypeError(f"{what} cannot be joined: return tensors, or containers of them")

    return tree_map(join, *outputs)


class DataParallel(nn.Module):
    """`module`, each forward shared out over `device_ids`, by default all GPUs or, without one, cpu:0. Outputs are
    gathered on `output_device`, by default the first. A number names a GPU or, without one, a virtual device.

    Raises `UsageError` for devices that are not there or of two kinds.
    """

    def __init__(
        self, module: nn.Module, device_ids: Devices = None, output_device: Device | None = None, dim: int = 0
    ) -> None:
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = resolve_devices(device_ids)
        self.output_device = self.devices[0] if output_device is None else resolve_devices([output_device])[0]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outputs = self.run_replicas(inputs, kwargs)
        return outputs[0] if len(self.devices) == 1 else gather(outputs, self.output_device, self.dim)

    def run_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, object]) -> list[Any]:
        """The output of each replica, where it was made."""
        chunks, kwargs_chunks = zip(*scatter((inputs, kwargs), self.devices, self.dim), strict=True)
        used = self.devices[: len(chunks)]
        replicas = [self.module] if len(self.devices) == 1 else replicate(self.module, used)
        return parallel_apply(replicas, chunks, kwargs_chunks, used)


if __name__ == "__main__":
    from playground.console.steps import become_command

    become_command(__file__)
