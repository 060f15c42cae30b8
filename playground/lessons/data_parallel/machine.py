"""The machine that DataParallel drives: devices, real or virtual, what is copied between them, and their threads.

For torch all of `cpu:0 … cpu:3` is one CPU. Who keeps account of which tensor lies on which of them is told here what
moves and whose work a thread does, and is asked where a tensor lies; without one, all lie in the host's memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from playground.runtime.errors import UsageError
from playground.training import device_work

Device: TypeAlias = "torch.device | str | int"
Devices: TypeAlias = "Sequence[Device] | None"
HOST = torch.device("cpu")
"""Memory of no device: where batches come from."""


def resolve_devices(devices: Devices = None) -> list[torch.device]:
    """The devices of these names, numbered; by default every GPU, or cpu:0 where there is none. Raises `UsageError` for
    an empty list, for unknown or absent devices, for two kinds.
    """
    if devices is None:
        devices = range(torch.cuda.device_count()) or ["cpu:0"]
    if not devices:
        raise UsageError("no devices: name at least one, as in cpu:0,cpu:1")
    resolved = [resolve_device(device) for device in devices]
    if len({device.type for device in resolved}) > 1:
        raise UsageError(f"devices {', '.join(map(str, resolved))}: all of one kind, either cpu:… or cuda:…")
    return resolved


def resolve_device(device: Device) -> torch.device:
    """One of them: "cuda" is cuda:0, and a number alone is that GPU, or that virtual device where there is no GPU."""
    if isinstance(device, int):
        device = f"{'cuda' if torch.cuda.is_available() else 'cpu'}:{device}"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown: write cpu:0, cpu:1, … or cuda:0, cuda:1, …")
    resolved = torch.device(resolved.type, resolved.index or 0)
    if resolved.type == "cuda" and resolved.index >= (count := torch.cuda.device_count()):
        raise UsageError(f"device {resolved} is absent, this machine shows {count} GPUs: use cpu:0, …")
    return resolved


def devices_of(inputs: Sequence[Any]) -> list[torch.device]:
    """Where each of these lies, by its first tensor. Those in the host's memory are taken for cpu:0, cpu:1, …"""
    found = [device_of(next(iter(tensors_in(each)), torch.empty(0))) for each in inputs]
    return [torch.device("cpu", number) if each == HOST else each for number, each in enumerate(found)]


observers: list[Any] = []
"""Accounts of devices, as `Account` in memory.py. The last one is called."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor lies; `HOST` for one in CPU memory that is not on a virtual device."""
    return observers[-1].device_of(tensor) if observers and tensor.device.type == "cpu" else tensor.device


@contextlib.contextmanager
def moving(part: str, target: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Tell that `part` of a training step copies `tensors` to `target`."""
    moved = [(device, each) for each in tensors if (device := device_of(each)) != target]
    observed = observers[-1].moving(part, moved, target) if observers else contextlib.nullcontext()
    with observed, device_work.moving(part, moved, target):
        yield


@contextlib.contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Tensors that this thread creates without a device are created on `device`."""
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    observed = observers[-1].working_for(device) if observers else contextlib.nullcontext()
    with on_gpu, observed, device_work.working_for(device):
        yield


def copy_to(tensor: torch.Tensor, device: torch.device, part: str, back: str = "gradients of inputs") -> torch.Tensor:
    """`tensor` on `device`: itself if it lies there, else a copy, on a virtual device too. In backward its gradient is
    copied the other way. `part` names the part of a training step that the copy belongs to, `back` that of its
    gradient's."""
    source = device_of(tensor)
    return tensor if source == device else Copy.apply(tensor, source, device, part, back)


class Copy(torch.autograd.Function):
    """A copy between devices, which may be virtual."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, source: torch.device, device: torch.device, part: str, back: str
    ) -> torch.Tensor:
        ctx.source, ctx.back = source, back
        with moving(part, device, tensor):
            return tensor.clone() if device.type == tensor.device.type == "cpu" else tensor.to(device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return copy_to(gradient, ctx.source, ctx.back), None, None, None, None


def broadcast(tensor: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """`tensor` on each of `devices`, the first of which is where it lies: there it is not copied. In backward the
    copies' gradients are copied there, and autograd adds them up."""
    return tensor.view_as(tensor), *(copy_to(tensor, device, "replicate", "reduce") for device in devices[1:])


class Join(torch.autograd.Function):
    """Tensors one after another along `dim`, on `device`. In backward each gets its part of the gradient, where it
    lies."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.sources, ctx.dim = [device_of(tensor) for tensor in tensors], dim
        ctx.sizes = [tensor.shape[dim] for tensor in tensors]
        with moving("gather", device, *tensors):
            shape = list(tensors[0].shape)
            shape[dim] = sum(ctx.sizes)
            whole = torch.empty(shape, dtype=tensors[0].dtype, device=device)
            for chunk, tensor in zip(whole.split(ctx.sizes, dim), tensors, strict=True):
                chunk.copy_(tensor)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        chunks = zip(gradient.split(ctx.sizes, ctx.dim), ctx.sources, strict=True)
        return None, None, *(copy_to(chunk, source, "gradients of outputs") for chunk, source in chunks)


@contextlib.contextmanager
def threads(devices: Sequence[torch.device]) -> Iterator[list[ThreadPoolExecutor]]:
    """A thread for each of these devices, kept from call to call. Python runs one at a time: the one that holds its
    global interpreter lock, the GIL. torch releases the GIL only while an operation computes.

    A new thread each time would have to set up again what the libraries below keep for a thread, memory above all: two
    threads would then be no faster than one. (A process that was forked has none of its parent's threads.)
    """
    workers: dict[tuple[int, int, torch.device], ThreadPoolExecutor] = _callers.__dict__.setdefault("workers", {})
    keys = [(os.getpid(), number, device) for number, device in enumerate(devices)]
    for key in keys:
        if key not in workers:
            workers[key] = ThreadPoolExecutor(1, thread_name_prefix=str(key[-1]))
    before = torch.get_num_threads()
    try:
        yield [workers[key] for key in keys]
    finally:
        torch.set_num_threads(before)  # what a thread sets is also what the process remembers


_callers = threading.local()
"""Each calling thread has threads of its own."""


def capture_modes(devices: Sequence[torch.device]) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A context, by the number of the device, in which its thread works as the caller would. torch keeps grad,
    inference and autocast modes thread by thread. On virtual devices the threads share the caller's cores, at least one
    each: more would only wait for each other. On a GPU each uses the caller's stream, in which its input was copied."""
    kind, share = devices[0].type, max(1, torch.get_num_threads() // len(devices))
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    dtype, autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    streams: list[Any] = [torch.cuda.current_stream(each) if kind == "cuda" else None for each in devices]

    @contextlib.contextmanager
    def enter(number: int) -> Iterator[None]:
        if kind == "cpu":
            torch.set_num_threads(share)
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(kind, dtype=dtype, enabled=autocast),
            torch.cuda.stream(streams[number]),
            use_device(devices[number]),
        ):
            yield

    return enter


def chunk_sizes(batch: int, devices: int) -> list[int]:
    """How many samples each device gets, as `torch.chunk` cuts: all the same, the last one what is left. Too few
    samples for all the devices leave some without a chunk: then fewer replicas run.

    >>> chunk_sizes(30, 3), chunk_sizes(10, 4), chunk_sizes(5, 4), chunk_sizes(0, 4)
    ([10, 10, 10], [3, 3, 3, 1], [2, 2, 1], [0])
    """
    most = -(-batch // devices)
    return [min(most, batch - start) for start in range(0, batch, most)] if batch else [0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
