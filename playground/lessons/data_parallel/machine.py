"""The machine that DataParallel drives: devices, real or virtual, what moves between them, and their threads; and
tensors in tuples (named ones too), lists and dicts: cut for every device, and joined again.

For torch all of `cpu:0 … cpu:3` is one CPU. Who keeps account of which tensor lies on which of them is told here what
moves and whose work a thread does, and is asked where a tensor lies; without one, all lie in the host's memory.

Moves come in pairs: in backward, each goes the other's way.

| forward                              | backward                                          |
|--------------------------------------|---------------------------------------------------|
| `Split`: chunks to several devices   | `Join`: the chunks' gradients on one              |
| `Join`: tensors to one device        | `Split`: the gradient's chunks to where they were |
| `Broadcast`: one tensor to several   | the copies' gradients come home and are added up  |

Source: Li et al., 2020, arXiv 2006.15704, section 2; https://docs.pytorch.org/docs/stable/notes/extending.html
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

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
        number = str(device).partition(":")[2]
        if number and int(number) != resolved.index:  # torch keeps 8 bits of it: cpu:256 would be cpu:0
            raise RuntimeError
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown: write cpu:0, cpu:1, … or cuda:0, cuda:1, …") from None
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f"device {resolved} is neither cpu nor cuda: write cpu:0, cpu:1, … or cuda:0, cuda:1, …")
    resolved = torch.device(resolved.type, resolved.index or 0)
    if resolved.type == "cuda" and resolved.index >= (count := torch.cuda.device_count()):
        raise UsageError(f"device {resolved} is absent, this machine shows {count} GPUs: use cpu:0, …")
    return resolved


def resolve_output_device(output_device: Device | None, devices: list[torch.device]) -> torch.device:
    """Where outputs are gathered: the first device unless another of the list is named. Raises `UsageError`."""
    if output_device is None:
        return devices[0]
    resolved = resolve_device(output_device)
    if resolved not in devices:
        names = ", ".join(map(str, devices))
        raise UsageError(f"output device {resolved} is none of the devices {names}: choose one of them")
    return resolved


observers: list[Any] = []
"""Accounts of virtual devices, or of what real ones do (`Account` in memory.py). The last one is told what is `moving`
and which device a thread is `working_for`, and asked for the `device_of` a tensor."""


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


def check_module_is_on(module: nn.Module, device: torch.device) -> None:
    """Raise `UsageError` if a parameter or buffer of `module` is not on `device`, from which it is to be copied."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        there = device_of(tensor)
        if there != device and not (there == HOST and device.type == "cpu"):
            why = f"a module is copied from the first device, so move it to {device} before"
            raise UsageError(f"{name} of {type(module).__name__} is on {there}: {why}")


def copy_to(tensor: torch.Tensor, device: torch.device, part: str) -> torch.Tensor:
    """`tensor` on `device`: itself if it lies there, else a copy, on a virtual device too. Not for gradients. `part` of
    a training step is what the move is put down to."""
    if device_of(tensor) == device:
        return tensor
    with moving(part, device, tensor):
        return tensor.clone() if device.type == tensor.device.type == "cpu" else tensor.to(device)


def split(
    tensor: torch.Tensor, devices: Sequence[torch.device], sizes: Sequence[int], dim: int
) -> tuple[torch.Tensor, ...]:
    """`tensor` cut along `dim` into `sizes`, a chunk to each of `devices`."""
    return Split.apply("scatter", tensor, devices, sizes, dim)


def join(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    """`tensors` one after another along `dim`, on `device`."""
    return Join.apply("gather", device, dim, *tensors)


def broadcast(tensor: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """`tensor` on each of `devices`, the first of which is where it lies. A buffer takes part in backward only if it
    wants a gradient; else it is itself on the first device."""
    if tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return Broadcast.apply(tensor, devices)
    return tensor, *(copy_to(tensor, device, "replicate") for device in devices[1:])


class Split(torch.autograd.Function):
    """`tensor` cut along `dim` into `sizes`, a chunk to each of `devices`."""

    @staticmethod
    def forward(
        ctx: Any, part: str, tensor: torch.Tensor, devices: Sequence[torch.device], sizes: Sequence[int], dim: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.came_from, ctx.dim = device_of(tensor), dim
        chunks = zip(tensor.split(sizes, dim), devices, strict=True)
        return tuple(copy_to(chunk, device, part) for chunk, device in chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, Join.apply("gradients of inputs", ctx.came_from, ctx.dim, *gradients), None, None, None


class Join(torch.autograd.Function):
    """`tensors` one after another along `dim`, on `device`."""

    @staticmethod
    def forward(ctx: Any, part: str, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.came_from = [device_of(tensor) for tensor in tensors]
        ctx.sizes, ctx.dim = [tensor.shape[dim] for tensor in tensors], dim
        with moving(part, device, *tensors):
            shape = list(tensors[0].shape)
            shape[dim] = sum(ctx.sizes)
            whole = torch.empty(shape, dtype=tensors[0].dtype, device=device)
            for chunk, tensor in zip(whole.split(ctx.sizes, dim), tensors, strict=True):
                chunk.copy_(tensor)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, *Split.apply("gradients of outputs", gradient, ctx.came_from, ctx.sizes, ctx.dim)


class Broadcast(torch.autograd.Function):
    """`tensor` on each of `devices`. On the first, where it lies, it is not copied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
        ctx.first = devices[0]
        return tensor.view_as(tensor), *(copy_to(tensor, device, "replicate") for device in devices[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *others: torch.Tensor) -> Any:
        for other in others:
            gradient = gradient + copy_to(other, ctx.first, "reduce")
        return gradient, None


@contextlib.contextmanager
def threads(devices: Sequence[torch.device]) -> Iterator[Callable[..., Future[Any]]]:
    """Yields `start(number, call, *args, **kwargs)`, which makes this call for `devices[number]`, in its own thread.

    Python runs one thread at a time: the one that holds its global interpreter lock, the GIL. torch releases the GIL
    only while an operation computes. The threads have the caller's grad, inference and autocast modes. On virtual
    devices they share the caller's cores: each computes with its part of torch's threads, at least one; more than
    there are cores would only wait for each other. On a GPU each uses the caller's stream, in which its input was
    copied. Backward is torch's own affair: autograd has one thread per GPU, but a single one for the CPU, and so for
    all virtual devices.
    """
    before = torch.get_num_threads()
    share, modes = max(1, before // len(devices)), capture_modes(devices[0].type)
    streams = [
        torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        for device in devices
    ]

    def work(number: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if devices[number].type == "cpu":
            torch.set_num_threads(share)
        with modes(), streams[number], use_device(devices[number]):
            return call(*args, **kwargs)

    def start(number: int, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return get_worker(number, devices[number]).submit(work, number, *args, **kwargs)

    try:
        yield start
    finally:
        torch.set_num_threads(before)  # what a thread sets is also what the process remembers


_callers = threading.local()


def get_worker(number: int, device: torch.device) -> ThreadPoolExecutor:
    """The calling thread's own thread for that replica, kept from call to call. A new one each time would have to set
    up again what the libraries below keep for a thread, memory above all: two threads would then be no faster than one.
    (A process that was forked has none of its parent's threads.)"""
    workers: dict[tuple[int, int, torch.device], ThreadPoolExecutor] = _callers.__dict__.setdefault("workers", {})
    key = os.getpid(), number, device
    if key not in workers:
        workers[key] = ThreadPoolExecutor(1, thread_name_prefix=str(device))
    return workers[key]


def capture_modes(kind: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that gives another thread the modes this one is in; torch keeps them thread by thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    dtype, autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(kind, dtype=dtype, enabled=autocast),
        ):
            yield

    return enter


def restate(error: BaseException, message: str) -> BaseException:
    """An error of the same type that says `message`; a RuntimeError if that type wants something else."""
    try:
        return type(error)(message)
    except TypeError:
        return RuntimeError(message)


def batch_size(inputs: Any, dim: int = 0) -> int:
    """The size that all tensors in `inputs` have in `dim`; 0 if there is no tensor.

    Raises `UsageError` for tensors without that dimension, or whose sizes in it differ.
    """
    tensors = list(tensors_in(inputs))
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            missing = f"an input of shape {list(tensor.shape)} has no batch dimension {dim}"
            todo = "every tensor is cut along it, so give it one, or pass a number instead of a tensor"
            raise UsageError(f"{missing}: {todo}")
    sizes = [tensor.shape[dim] for tensor in tensors]
    if len(set(sizes)) > 1:
        raise UsageError(f"inputs of different batch sizes {', '.join(map(str, sizes))}: all must have the same")
    return sizes[0] if sizes else 0


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that `spread` cuts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def spread(value: Any, count: int, cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[Any]:
    """`count` values of the structure of `value`: each has one of the chunks that `cut` makes of every tensor."""
    if isinstance(value, torch.Tensor):
        return list(cut(value))
    if not isinstance(value, (dict, tuple, list)):
        return [value] * count
    parts = [spread(item, count, cut) for item in (value.values() if isinstance(value, dict) else value)]
    return [remake(value, (part[number] for part in parts)) for number in range(count)]


def unite(values: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """One value of the structure of each of `values`, its tensors made of theirs by `join`. Of None there is one.

    Raises `TypeError` for what holds no tensors, `ValueError` for containers of different lengths or keys.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return join([each.reshape(1) if each.dim() == 0 else each for each in values])
    if first is None:
        return None
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in values):
            raise ValueError("the replicas' outputs have different keys: they cannot be joined")
        return remake(first, (unite([each[key] for each in values], join) for key in first))
    if isinstance(first, (tuple, list)):
        return remake(first, (unite(each, join) for each in zip(*values, strict=True)))
    raise TypeError(f"an output of type {type(first).__name__} cannot be joined: return tensors, or containers of them")


def remake(like: Any, values: Iterable[Any]) -> Any:
    """A container of the type of `like`, a dict with its keys, of these values in their order."""
    if isinstance(like, dict):
        return type(like)(zip(like, values, strict=True))
    return getattr(type(like), "_make", type(like))(values)
