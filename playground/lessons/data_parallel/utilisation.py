"""Utilisation: the share of a step in which each device computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from playground.lessons.data_parallel.memory import track_memory
from playground.measurement.interleave import synchronize


class Utilisation:
    """What `track_utilisation` has seen, once it is over."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.seconds = 0.0
        """From begin to end."""
        self.busy = dict.fromkeys(devices, 0.0)
        """Seconds in which each device computed."""

    @property
    def share(self) -> dict[torch.device, float]:
        """Of the time from begin to end, 0 to 1."""
        return self.share_of(self.seconds)

    def share_of(self, seconds: float) -> dict[torch.device, float]:
        """The share of so many seconds: those that the same step takes when nobody looks on."""
        return {device: min(1.0, busy / seconds) for device, busy in self.busy.items()}


@contextlib.contextmanager
def track_utilisation(devices: Sequence[torch.device]) -> Iterator[Utilisation]:
    """Find out how long each of `devices` computes meanwhile:

        with track_utilisation(devices) as use:
            step()
        print(use.share)

    On virtual devices, and in ranks, operations are timed one by one, and count for the device where they run: in
    seconds that their thread computes, so that waiting for a core, for the GIL or for a message is idle time, as are
    copies between devices. In a process with fewer cores than devices the shares therefore add up to the cores at most.
    What the first thread does without saying where counts for the first device. Not inside `track_memory`.

    Looking on costs some 16 us per operation, in which no device computes: of small operations shares come out too
    low. `share_of` relates the same seconds to a step that was timed apart.

    On GPUs it is the time in which at least one kernel runs, as torch's profiler records it, without NCCL's.
    """
    track = track_kernels if devices[0].type == "cuda" else track_operations
    use = Utilisation(devices)
    with track(use):
        yield use


@contextlib.contextmanager
def track_operations(use: Utilisation) -> Iterator[None]:
    """Time every operation, on virtual devices."""
    with track_memory([*use.busy], default=next(iter(use.busy)), timed=True) as account:
        start = time.perf_counter()
        yield
        use.seconds = time.perf_counter() - start
    use.busy = {device: account.busy[device] for device in use.busy}


@contextlib.contextmanager
def track_kernels(use: Utilisation) -> Iterator[None]:
    """Have torch's profiler record the kernels of every GPU."""
    synchronize([*use.busy])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        yield
        synchronize([*use.busy])
        use.seconds = time.perf_counter() - start
    events = [event for event in profiler.events() if is_computing(event)]
    for device in use.busy:
        spans = [
            (event.time_range.start, event.time_range.end) for event in events if event.device_index == device.index
        ]
        use.busy[device] = covered(spans) / 1e6  # the profiler counts microseconds


def is_computing(event: Any) -> bool:
    """Whether an event of the profiler is a kernel of a GPU, and neither a copy nor communication."""
    kernel = event.device_type == torch.autograd.DeviceType.CUDA
    return kernel and not event.name.lower().startswith(("nccl", "memcpy", "memset"))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """How much time lies in at least one of `spans`, (begin, end).

    >>> covered([(0, 2), (1, 3), (5, 6), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
