"""In a rank: records a function that it runs.

Before it, ranks on other hosts than rank 0's compare their clocks with that. On a GPU a receive returns at once, and
only orders what comes after it: a message has arrived when its value has been read.

A rank only issues work to its GPU, and is soon ahead of it. At the start and end of its events it therefore records
CUDA events, called marks here, and the GPU takes the time when it reaches them: these times have a lane of their own.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from playground.algorithms.messages import executed_by
from playground.runtime import device
from playground.runtime.host import host_id
from playground.runtime.meeting.agreement import all_gather_object
from playground.runtime.rank import steps
from playground.runtime.remote import Remote
from playground.runtime.tap import observing
from playground.runtime.tap.replacement import replaced
from playground.see.record import BUCKET, COLLECTIVE, COMPUTE, DEVICE, GRADIENT, PHASE, layout
from playground.see.record.algorithms import RecordingExecutor
from playground.see.record.distributed import CallRecorder
from playground.see.record.layout import LANE_CODES, RECORD, RUN, EventRecord, place_of, read_rank_files
from playground.see.record.recorder import CAPACITY, Recorder
from playground.see.record.training import BucketHooks, TrainingHooks, recorded_devices

ROUNDS = 100
"""Number of round trips, of which the shortest counts: nothing delayed it."""
TAG = 20171


def compare_clocks(rank: int, ranks: list[int], clock: Callable[[], int]) -> tuple[int, int]:
    """Compare the clocks of `ranks`, one after the other, with rank 0's. These, and rank 0, must call this.

    Returns the offset of rank 0's clock to this rank's, and its maximum error: half of the shortest round trip. Source:
    Cristian, Probabilistic clock synchronization (1989)
    """
    ping, pong = torch.zeros(2, 1, dtype=torch.int64, device=device())
    if rank == 0:
        for other in ranks:
            for _ in range(ROUNDS):
                dist.recv(ping, other, tag=TAG)
                ping.item()
                dist.send(pong.fill_(clock()), other, tag=TAG)
        return 0, 0
    samples = []
    for _ in range(ROUNDS):
        asked = clock()
        dist.send(ping, 0, tag=TAG)
        dist.recv(pong, 0, tag=TAG)
        theirs, answered = int(pong.item()), clock()
        middle = (asked + answered) // 2
        samples.append((theirs - middle, (answered - asked + 1) // 2))
    return min(samples, key=lambda sample: sample[1])


ON_DEVICE = (COMPUTE, GRADIENT, BUCKET, COLLECTIVE)
"""Kinds that have an event on the device, too, whose parent is the rank's. (A collective of our own has one; its
messages have none.)"""
PATIENCE = 1.0
"""Seconds that the end of a recording waits for a GPU, which may wait for a rank that is gone."""


def record_mark(device: torch.device) -> torch.cuda.Event:
    """Record an event after all work that this thread has issued to that device. (In a thread that torch calls back in,
    or that a rank has started, it may not be the current device.)"""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


Anchor = tuple[torch.cuda.Event, int]
"""A mark, and the time of its completion on the host's clock, in nanoseconds."""


class DeviceRecorder(Recorder):
    """A recorder that also records the times of the rank's GPU, but not of others that its process drives."""

    def __init__(
        self,
        *args: Any,
        gpu: torch.device,
        mark: Callable[[torch.device], torch.cuda.Event] = record_mark,
        capacity: int = CAPACITY,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, capacity=capacity, reserve=capacity, **kwargs)
        self.gpu, self.mark = gpu, mark
        self.begun: dict[int, torch.cuda.Event] = {}
        self.ended: dict[int, torch.cuda.Event] = {}
        """Marks by the number of the event."""
        self.first = self.anchor()

    def begin(self, kind: str, *args: Any, **kwargs: Any) -> int:
        number = super().begin(kind, *args, **kwargs)
        if kind in ON_DEVICE and number != self.unread and self.thread.device in (None, self.gpu):
            self.begun[number] = self.mark(self.gpu)
            if kind == GRADIENT:  # an instant
                self.ended[number] = self.begun[number]
        return number

    def end(self, number: int) -> None:
        self.end_all([number])

    def end_all(self, numbers: Iterable[int]) -> None:
        """Record and mark the ends. The last mark counts: a call that returned at once ends again with its work."""
        numbers = [*numbers]
        super().end_all(numbers)
        for number in numbers:
            if number in self.begun:
                self.ended[number] = self.mark(self.gpu)

    @contextlib.contextmanager
    def working_for(self, device: torch.device) -> Iterator[None]:
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

    def anchor(self) -> Anchor | None:
        """The current time on both clocks; None if the GPU does not reach the mark."""
        mark, deadline = self.mark(self.gpu), time.monotonic() + PATIENCE
        while not mark.query():
            if time.monotonic() > deadline:
                return None
        return mark, self.clock()

    def write_device_lane(self) -> None:
        """Copy the events whose work the GPU has done into the reserve, with the GPU's times."""
        copy, last = self.use_reserve(), self.anchor()
        if self.first is None:
            return
        mark, began = self.first
        rate = 1e6 if last is None else (last[1] - began) / mark.elapsed_time(last[0])  # host ns in a ms of the GPU
        for number, begun in list(self.begun.items()):
            ended = self.ended.get(number)  # may be recorded on a different stream
            if ended is not None and begun.query() and ended.query():
                start = began + round(rate * mark.elapsed_time(begun))
                record = EventRecord(*RECORD.unpack_from(self.target, place_of(number)))._replace(
                    start=start, end=start + round(rate * begun.elapsed_time(ended)),
                    parent=number, lane=LANE_CODES[DEVICE], wait=layout.NONE, values=layout.NONE,
                )  # fmt: skip
                RECORD.pack_into(self.target, place_of(copy), *record)
                copy += 1


_recorders: list[Recorder] = []
"""The active recorder of this process, if any."""


@contextlib.contextmanager
def recorded(
    folder: Path, rank: int, size: int, run: str = "", clock: Callable[[], int] = time.perf_counter_ns
) -> Iterator[Recorder]:
    """Record this rank in this block, into `folder`. All ranks must enter the block, and leave it unless they fail.

    Afterwards the files of other hosts are in rank 0's folder, too. `run` is the content of run.json there; `clock`
    returns nanoseconds.
    """
    hosts = all_gather_object(host_id())
    strangers = [other for other, host in enumerate(hosts) if host != hosts[0]]
    offset, bound = compare_clocks(rank, strangers, clock) if strangers and rank in (0, *strangers) else (0, 0)
    about = {"host": socket.gethostname(), "device": str(device()), "offset": offset, "bound": bound}
    with contextlib.suppress(OSError):  # the recorder reports it
        folder.mkdir(parents=True, exist_ok=True)
    is_gpu = device().type == "cuda"
    make: Callable[..., Recorder] = functools.partial(DeviceRecorder, gpu=device()) if is_gpu else Recorder
    recorder = make(folder, rank, clock=clock, **about)
    if run:
        with contextlib.suppress(OSError):  # then the launcher writes it
            (folder / RUN).write_text(run)
    _recorders[:] = [recorder]
    try:
        with installed(recorder):
            yield recorder
    finally:
        _recorders.clear()
        recorder.stop()
    if strangers and dist.is_initialized() and dist.get_world_size() == size:  # the function may have left its group
        bring_to_rank_0(folder, rank, strangers)


def bring_to_rank_0(folder: Path, rank: int, strangers: list[int]) -> None:
    """Copy the files of these ranks, which may be on other disks, into rank 0's folder. All ranks must call this."""
    files = read_rank_files(folder, rank) if rank in strangers else ()
    for theirs in all_gather_object(dict(files)):
        if rank == 0:
            for name, content in theirs.items():
                try:
                    (folder / name).write_bytes(content)
                except OSError as error:
                    print(f"--see: {name} is missing in {folder} ({error.strerror})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Install all recorders in this block; each step of a lesson in it is a phase."""

    def wrap_attempt(attempt: Any) -> Any:
        def attempt_phase(step: Remote, *args: Any) -> Any:
            with recorder.span(PHASE, step.name):
                return attempt(step, *args)

        return attempt_phase

    calls = CallRecorder(recorder)
    with (
        observing(calls),
        executed_by(RecordingExecutor(recorder, calls)),
        replaced(steps, "attempt", wrap_attempt),
        recorded_devices(recorder),
        TrainingHooks(recorder, BucketHooks(recorder, calls)).installed(),
    ):
        yield


def forget() -> None:
    """Stop recording in a process that was forked from a rank, such as a worker of a DataLoader."""
    while _recorders:
        _recorders.pop().let_go()


os.register_at_fork(after_in_child=forget)
