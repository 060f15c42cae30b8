"""In a rank with a GPU: when the GPU did what the rank issued to it, in a lane of its own.

A rank only issues work to its GPU, and is soon ahead of it. Wherever something begins and ends for the rank, it
therefore leaves a mark among the work issued; the GPU takes the time when it gets there.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from playground.recording.layout import LANE_CODES, NONE, RECORD, Record, place_of
from playground.recording.recorder import Recorder
from playground.recording.recording import BUCKET, COLLECTIVE, COMPUTE, DEVICE, GRADIENT

ON_DEVICE = (COMPUTE, GRADIENT, BUCKET, COLLECTIVE)
"""What has an event on the device, too, whose parent is the rank's. (A collective of our own has one; its messages have
none.)"""
PATIENCE = 1.0
"""Seconds that the end of a recording waits for the GPU: what it has not done by then is left out, as it may wait there
for a rank that is gone."""


class Mark(Protocol):
    """A place among the work issued to a GPU, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has come by."""
        ...

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds until it came by `end`. It must have come by both."""
        ...


class Gpu:
    """A rank's GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Leave a mark behind all that this thread has issued so far."""
        mark = torch.cuda.Event(enable_timing=True)
        # That of the rank's own device: in the threads that torch calls back in, another may be the current one.
        mark.record(torch.cuda.current_stream(self.device))
        return mark


@dataclass(frozen=True)
class Anchor:
    """A mark, and when the GPU came by, by the host's clock."""

    mark: Mark
    nanoseconds: int


class DeviceRecorder(Recorder):
    """A recorder that also takes the GPU's times."""

    def __init__(self, *args: Any, gpu: Gpu, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gpu = gpu
        self.begun: dict[int, Mark] = {}
        self.ended: dict[int, Mark] = {}
        """By the number of the event."""
        self.first = self.anchor()

    def begin(self, kind: str, *args: Any, **kwargs: Any) -> int:
        number = super().begin(kind, *args, **kwargs)
        if kind in ON_DEVICE:
            self.begun[number] = self.gpu.mark()
        if kind == GRADIENT:  # an instant
            self.ended[number] = self.begun[number]
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
        """What comes last counts: a call that returned at once has ended anew when its work is done."""
        if number in self.begun:
            self.ended[number] = self.gpu.mark()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the GPU may be what failed: the rank has told of that
            self.write_device_lane()
        super().stop()

    def anchor(self) -> Anchor | None:
        """Where both clocks are now; None if the GPU does not get there."""
        mark, deadline = self.gpu.mark(), time.monotonic() + PATIENCE
        while not mark.query():
            if time.monotonic() > deadline:
                return None
        return Anchor(mark, self.clock())

    def write_device_lane(self) -> None:
        """For whatever the GPU has done, a copy of the rank's event with the GPU's times."""
        first, last = self.first, self.anchor()
        if first is None:
            return
        rate = 1e6  # nanoseconds of the host in a millisecond of the GPU
        if last is not None:
            rate = (last.nanoseconds - first.nanoseconds) / first.mark.elapsed_time(last.mark)
        for number, ended in list(self.ended.items()):
            begun = self.begun[number]  # left, it may be, in another stream
            if number < self.capacity and begun.query() and ended.query():
                start = first.nanoseconds + round(rate * first.mark.elapsed_time(begun))
                self.copy_to_device(number, start, start + round(rate * begun.elapsed_time(ended)))

    def copy_to_device(self, number: int, start: int, end: int) -> None:
        """The event once more, as the device's, at these nanoseconds."""
        record = Record(*RECORD.unpack_from(self.target, place_of(number)))
        copy = record._replace(start=start, end=end, parent=number, lane=LANE_CODES[DEVICE], wait=NONE, values=NONE)
        RECORD.pack_into(self.target, place_of(self.take_number()), *copy)
