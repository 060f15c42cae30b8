"""parallel_apply: every replica runs on its own input, in a thread of its own.

Python runs one thread at a time: the one that holds its global interpreter lock, the GIL. torch releases the GIL only
while an operation computes.
Backward is torch's own affair: autograd has one thread per GPU, but a single one for the CPU, and so for all virtual
devices.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from playground.lessons.data_parallel.memory import track_thread
from playground.training import device_work

_callers = threading.local()


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, object]] | None,
    devices: Sequence[torch.device],
) -> list[Any]:
    """What `modules[i](*inputs[i], **kwargs[i])` returns on `devices[i]`, for every i at once.

    The threads have the caller's grad, inference and autocast modes. On virtual devices they share the caller's cores:
    each computes with its part of torch's threads, at least one.

    Raises the error of the first replica that failed, with the device's name before the message.
    """
    outputs: list[Any] = [None] * len(modules)
    errors: dict[int, BaseException] = {}
    modes, streams = capture_modes(devices[0].type), capture_streams(devices)

    def run(number: int, threads: int) -> None:
        try:
            if devices[number].type == "cpu":
                torch.set_num_threads(threads)
            with modes(), streams[number], use_device(devices[number]):
                outputs[number] = modules[number](*inputs[number], **(kwargs[number] if kwargs else {}))
        except BaseException as error:  # whatever it is: nobody else would hear of it
            errors[number] = error

    with share_threads(len(modules)) as share:
        wait([get_worker(number, devices[number]).submit(run, number, share) for number in range(len(modules))])
    for number, error in sorted(errors.items()):
        raise restate(error, f"replica {number} on {devices[number]}: {error}") from error
    return outputs


def get_worker(number: int, device: torch.device) -> ThreadPoolExecutor:
    """The calling thread's own thread for that replica, kept from call to call.

    A new one each time would have to set up anew what the libraries below keep for a thread, memory above all: two
    threads would then be no faster than one. (A process that was forked has none of its parent's threads.)
    """
    workers: dict[tuple[int, int, torch.device], ThreadPoolExecutor] = _callers.__dict__.setdefault("workers", {})
    key = os.getpid(), number, device
    if key not in workers:
        workers[key] = ThreadPoolExecutor(1, thread_name_prefix=str(device))
    return workers[key]


@contextlib.contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """What this thread makes without saying where, it makes on `device`."""
    on_gpu = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_gpu, track_thread(device), device_work.working_for(device):
        yield


def capture_streams(devices: Sequence[torch.device]) -> list[contextlib.AbstractContextManager[Any]]:
    """For each GPU, a context with the stream that the caller uses there: in it the input has been copied."""
    return [
        torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        for device in devices
    ]


def capture_modes(kind: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that gives another thread the modes this one is in; torch keeps them thread by thread."""
    grad, inference, autocast = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(kind),
    )  # fmt: skip
    dtype = torch.get_autocast_dtype(kind)

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(kind, dtype=dtype, enabled=autocast),
        ):
            yield

    return enter


@contextlib.contextmanager
def share_threads(workers: int) -> Iterator[int]:
    """How many threads of torch each of `workers` may use; more than there are cores would only wait for each other.

    What a thread sets is also what the process remembers, so afterwards it is set back.
    """
    before = torch.get_num_threads()
    try:
        yield max(1, before // workers)
    finally:
        torch.set_num_threads(before)


def restate(error: BaseException, message: str) -> BaseException:
    """An error of the same type that says `message`; a RuntimeError if that type wants something else."""
    try:
        return type(error)(message)
    except TypeError:
        return RuntimeError(message)
