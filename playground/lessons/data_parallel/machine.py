"""The machine that DataParallel drives: devices, real or virtual, what is copied between them, and
their threads. On it run the functions of the board, for nested inputs and with torch's arguments.

For torch all of `cpu:0 … cpu:3` is one CPU. Observers of `device_work` are told what moves and
whose work a thread does, and are asked where a tensor lies; without one, all lie in the host's
memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import playground.lessons.data_parallel.lesson as board
from playground.runtime.errors import UsageError
from playground.training.device_work import device_of, moving, working_for

Device: TypeAlias = "torch.device | str | int"
Devices: TypeAlias = "Sequence[Device] | None"
HOST = torch.device("cpu")
"""Memory of no device: where batches come from."""


def resolve_devices(devices: Devices = None) -> list[torch.device]:
    """The devices of these names, numbered; by default every GPU, or cpu:0 where there is none.
    Raises `UsageError` for an empty list, for unknown or absent devices, for two kinds.
    """
    if devices is None:
        devices = range(torch.cuda.device_count()) or ["cpu:0"]
    if not devices:
        raise UsageError("no devices: name at least one, as in cpu:0,cpu:1")
    resolved = [resolve_device(device) for device in devices]
    if len({device.type for device in resolved}) > 1:
        raise UsageError(
            f"devices {', '.join(map(str, resolved))}: all of one kind, either cpu:… or cuda:…"
        )
    return resolved


def resolve_device(device: Device) -> torch.device:
    """One of them: "cuda" is cuda:0, and a number alone is that GPU, or that virtual device where
    there is no GPU."""
    if isinstance(device, int):
        device = f"{'cuda' if torch.cuda.is_available() else 'cpu'}:{device}"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(
            f"device {device!r} is unknown: write cpu:0, cpu:1, … or cuda:0, cuda:1, …"
        )
    resolved = torch.device(resolved.type, resolved.index or 0)
    if resolved.type == "cuda" and resolved.index >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"device {resolved} is absent, this machine shows {count} GPUs: use cpu:0, …"
        )
    return resolved


def devices_of(inputs: Sequence[Any]) -> list[torch.device]:
    """Where each of these lies, by its first tensor. Those in the host's memory are taken for
    cpu:0, cpu:1, …"""
    found = [device_of(next(iter(tensors_in(each)), torch.empty(0))) for each in inputs]
    return [
        torch.device("cpu", number) if each == HOST else each for number, each in enumerate(found)
    ]


@contextlib.contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Tensors that this thread creates without a device are created on `device`."""
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_gpu, working_for(device):
        yield


def copy_to(
    tensor: torch.Tensor, device: torch.device, part: str, back: str = "gradients of inputs"
) -> torch.Tensor:
    """`tensor` on `device`: itself if it lies there, else a copy, on a virtual device too. In
    backward its gradient is copied the other way. `part` names the part of a training step that the
    copy belongs to, `back` that of its gradient's."""
    source = device_of(tensor)
    return tensor if source == device else Copy.apply(tensor, source, device, part, back)


class Copy(torch.autograd.Function):
    """A copy between devices, which may be virtual."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        source: torch.device,
        device: torch.device,
        part: str,
        back: str,
    ) -> torch.Tensor:
        ctx.source = source
        ctx.back = back
        with moving(part, device, tensor):
            return (
                tensor.clone() if device.type == tensor.device.type == "cpu" else tensor.to(device)
            )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return copy_to(gradient, ctx.source, ctx.back), None, None, None, None


class Join(torch.autograd.Function):
    """Tensors one after another along `dim`, on `device`. In backward each gets its part of the
    gradient, where it lies."""

    @classmethod
    def join(cls, tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
        joined: torch.Tensor = cls.apply(device, dim, *tensors)
        return joined

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.sources = [device_of(tensor) for tensor in tensors]
        ctx.dim = dim
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
        return (
            None,
            None,
            *(copy_to(chunk, source, "gradients of outputs") for chunk, source in chunks),
        )


class DeviceThreads(Executor):
    """A thread for each of these devices, kept from call to call. What is submitted first runs for
    the first device. Python runs one at a time: the one that holds its global interpreter lock, the
    GIL. torch releases the GIL only while an operation computes.

    A new thread each time would have to set up again what the libraries below keep for a thread,
    memory above all: two threads would then be no faster than one. (A process that was forked has
    none of its parent's threads.)
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices, self.work_as_caller, self.before = (
            devices,
            capture_modes(devices),
            torch.get_num_threads(),
        )
        self.running: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        number = len(self.running)
        workers: dict[tuple[int, int, torch.device], Executor] = _callers.__dict__.setdefault(
            "workers", {}
        )
        key = os.getpid(), number, self.devices[number]
        if key not in workers:
            workers[key] = ThreadPoolExecutor(1, thread_name_prefix=str(key[-1]))
        self.running.append(workers[key].submit(self.work, number, fn, *args, **kwargs))
        return self.running[-1]

    def work(self, number: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self.work_as_caller(number):
                return fn(*args, **kwargs)
        except BaseException as error:
            raise RuntimeError(f"replica {number} on {self.devices[number]}: {error}") from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait until all is done. The threads are kept."""
        futures.wait(self.running)
        torch.set_num_threads(self.before)  # what a thread sets is also what the process remembers


_callers = threading.local()
"""Each calling thread has threads of its own."""


def capture_modes(
    devices: Sequence[torch.device],
) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A context, by the number of the device, in which its thread works as the caller would. torch
    keeps grad, inference and autocast modes thread by thread. On virtual devices the threads share
    the caller's cores, at least one each: more would only wait for each other. On a GPU each uses
    the caller's stream, in which its input was copied."""
    kind, share = devices[0].type, max(1, torch.get_num_threads() // len(devices))
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    dtype, autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    streams: list[Any] = [
        torch.cuda.current_stream(each) if kind == "cuda" else None for each in devices
    ]

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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def scatter(inputs: Any, devices: Devices, dim: int = 0) -> list[Any]:
    """`inputs` for each device that gets a chunk: the same structure, its tensors cut along `dim`.
    Tuples, lists and dicts are looked into; anything else goes to every device, or to the first
    alone if there is no tensor.

    Raises `ValueError` for tensors of different lengths.
    """
    devices, (leaves, structure) = resolve_devices(devices), tree_flatten(inputs)
    batch, *others = sorted(
        {leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor)}
    ) or [0]
    if others:
        raise ValueError(
            f"tensors of {batch} and of {others[-1]} samples: all must have the same number"
        )
    # of fewer samples than devices some get none
    used = devices[: len(board.chunk_sizes(batch, len(devices)))]
    to = partial(copy_to, part="scatter")
    columns = [
        board.scatter(leaf, used, dim, to) if isinstance(leaf, torch.Tensor) else [leaf] * len(used)
        for leaf in leaves
    ]
    return [
        tree_unflatten([column[number] for column in columns], structure)
        for number in range(len(used))
    ]


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """A replica of `module` on each of `devices`, the first of which is where it lies: there
    nothing is copied."""
    first, *_ = devices = resolve_devices(devices)

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return (
            tensor.view_as(tensor)
            if device == first
            else copy_to(tensor, device, "replicate", "reduce")
        )

    return board.replicate(module, devices, to)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, object]] | None = None,
    devices: Devices = None,
) -> list[Any]:
    """The results of `modules[i](*inputs[i], **kwargs_tup[i])` on `devices[i]`, by default where
    its input lies, for all i at once, each in its own thread. Raises `RuntimeError` for the first
    replica that failed, with its device.
    """
    used = devices_of(inputs) if devices is None else resolve_devices(devices)
    calls = [
        partial(each, **more)
        for each, more in zip(modules, kwargs_tup or [{}] * len(used), strict=True)
    ]
    return board.parallel_apply(calls, inputs, lambda _: DeviceThreads(used))


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """One output with the structure of each of `outputs`, its tensors joined along `dim` on
    `device`. Numbers, as losses are, become a vector with one for each replica. Raises `TypeError`
    for what cannot be joined.
    """
    [target] = resolve_devices([device])

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], torch.Tensor):
            return board.gather(parts, target, dim, Join.join)
        if parts[0] is not None:
            what = f"an output of type {type(parts[0]).__name__}"
            raise TypeError(f"{what} cannot be joined: return tensors, or containers of them")

    return tree_map(join, *outputs)


class DataParallel(board.DataParallel):
    """`module`, each forward shared out over `device_ids`, by default all GPUs or, without one,
    cpu:0. Outputs are gathered on `output_device`, by default the first. A number names a GPU or,
    without one, a virtual device.

    Raises `UsageError` for devices that are not there or of two kinds.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Devices = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        output = None if output_device is None else resolve_device(output_device)
        super().__init__(module, resolve_devices(device_ids), output, dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outputs = self.run_replicas(inputs, kwargs)
        return (
            outputs[0] if len(self.devices) == 1 else gather(outputs, self.output_device, self.dim)
        )

    def run_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, object]) -> list[Any]:
        """The output of each replica, where it was made."""
        chunks, kwargs_chunks = zip(*scatter((inputs, kwargs), self.devices, self.dim), strict=True)
        used = self.devices[: len(chunks)]
        replicas = [self.module] if len(self.devices) == 1 else replicate(self.module, used)
        return parallel_apply(replicas, chunks, kwargs_chunks, used)
