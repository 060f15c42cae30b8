"""In a rank with a GPU: records when the GPU did the work that the rank issued, in a lane of its own.

A rank only issues work to its GPU, and is soon ahead of it. At the start and end of its events it therefore records
CUDA events, called marks here, and the GPU takes the time when it reaches them.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from playground.see.record import BUCKET, COLLECTIVE, COMPUTE, DEVICE, GRADIENT
from playground.see.record.layout import LANE_CODES, NONE, RECORD, Record, place_of
from playground.see.record.recorder import CAPACITY, Recorder

ON_DEVICE = (COMPUTE, GRADIENT, BUCKET, COLLECTIVE)
"""Kinds that have an event on the device, too, whose parent is the rank's. (A collective of our own has one; its
messages have none.)"""
PATIENCE = 1.0
"""Seconds that the end of a recording waits for a GPU. Work not done by then is left out: it may wait for a rank that
is gone."""
NEAR = 1000.0
"""Maximum distance, in milliseconds, to the mark from which others are measured. CUDA's times are float32: their
resolution is 0.06 µs at a second, and 60 µs at 1000 s."""


class Mark(Protocol):
    """The methods of `torch.cuda.Event` that are used."""

    def query(self) -> bool:
        """Whether the event has completed."""
        ...

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds until `end`. Both must have completed."""
        ...


class Gpu:
    """A rank's GPU, and others that its process drives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The rank's own."""

    def mark(self, device: torch.device) -> Any:
        """Record an event after all work that this thread has issued to that device. (In a thread that torch calls back
        in, or that a rank has started, it may not be the current device.)"""
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(device))
        return mark


@dataclass(frozen=True)
class Anchor:
    """A mark, and the time of its completion on the host's clock."""

    mark: Mark
    nanoseconds: int


class DeviceRecorder(Recorder):
    """A recorder that also records the GPU's times."""

    def __init__(self, *args: Any, gpu: Gpu, capacity: int = CAPACITY, **kwargs: Any) -> None:
        super().__init__(*args, capacity=capacity, reserve=capacity, **kwargs)
        self.gpu = gpu
        self.begun: dict[int, tuple[torch.device, Mark]] = {}
        self.ended: dict[int, Mark] = {}
        """Marks by the number of the event."""
        self.anchors = {gpu.device: self.anchor(gpu.device)}
        """The first anchor of each device."""

    def begin(self, kind: str, *args: Any, **kwargs: Any) -> int:
        number = super().begin(kind, *args, **kwargs)
        if kind in ON_DEVICE and number != self.unread:
            device = self.thread.device or self.gpu.device
            mark = self.gpu.mark(device)
            self.begun[number] = device, mark
            if kind == GRADIENT:  # an instant
                self.ended[number] = mark
        return number

    def end(self, number: int) -> None:
        super().end(number)
        self.mark_end(number)

    def end_all(self, numbers: Iterable[int]) -> None:
        numbers = [*numbers]
        super().end_all(numbers)
        for number in numbers:
            self.mark_end(number)

    def mark_end(self, number: int) -> None:
        """Mark the end of an event. The last mark counts: a call that returned at once ends again when its work is
        done."""
        if number in self.begun:
            self.ended[number] = self.gpu.mark(self.begun[number][0])

    @contextlib.contextmanager
    def working_for(self, device: torch.device) -> Iterator[None]:
        if device.type == self.gpu.device.type:
            if device not in self.anchors:
                self.anchors[device] = self.anchor(device)
            self.thread.device = device
        try:
            with super().working_for(device):
                yield
        finally:
            self.thread.device = None

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the GPU may have failed, which the rank has reported
            self.write_device_lane()
        super().stop()

    def anchor(self, device: torch.device) -> Anchor | None:
        """The current time on both clocks; None if the GPU does not reach the mark."""
        mark, deadline = self.gpu.mark(device), time.monotonic() + PATIENCE
        while not mark.query():
            if time.monotonic() > deadline:
                return None
        return Anchor(mark, self.clock())

    def write_device_lane(self) -> None:
        """Copy the events whose work the GPUs have done into the reserve, with the GPU's times."""
        copy = self.use_reserve()
        for device, first in self.anchors.items():
            if first is not None:
                for number, start, end in self.times_on(device, first):
                    if not self.make_reserve_room(copy):
                        return
                    record = Record(*RECORD.unpack_from(self.target, place_of(number)))
                    lane = LANE_CODES[DEVICE]
                    record = record._replace(start=start, end=end, parent=number, lane=lane, wait=NONE, values=NONE)
                    RECORD.pack_into(self.target, place_of(copy), *record)
                    copy += 1

    def times_on(self, device: torch.device, first: Anchor) -> Iterator[tuple[int, int, int]]:
        """The numbers of the events whose work this GPU has done, and their starts and ends in nanoseconds."""
        last, near, passed = self.anchor(device), first.mark, 0.0
        found = []
        for number, (its_device, begun) in list(self.begun.items()):
            ended = self.ended.get(number)  # may be recorded on a different stream
            if its_device == device and ended is not None and begun.query() and ended.query():
                since = near.elapsed_time(begun)
                if since > NEAR:
                    near, passed, since = begun, passed + since, 0.0
                found.append((number, passed + since, begun.elapsed_time(ended)))
        rate = 1e6  # nanoseconds of the host in a millisecond of the GPU
        if last is not None:
            rate = (last.nanoseconds - first.nanoseconds) / (passed + near.elapsed_time(last.mark))
        for number, start, milliseconds in found:
            began = first.nanoseconds + round(rate * start)
            yield number, began, began + round(rate * milliseconds)
