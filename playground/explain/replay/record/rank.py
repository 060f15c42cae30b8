"""In a rank: records a function that it runs.

On a GPU a receive returns at once, and only orders what comes after it; and a rank that issues work
to its GPU is soon ahead of it: recorded times are those at which calls were made. Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from playground.algorithms.executor import executed_by
from playground.base.files import create
from playground.explain.replay.record import layout
from playground.explain.replay.record.algorithms import RecordingExecutor
from playground.explain.replay.record.distributed import CallRecorder
from playground.explain.replay.record.layout import RUN
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.record.training import DeviceRecorder, TrainingHooks
from playground.lessons.devices import observing as observing_devices
from playground.tap import observing
from playground.world.backends import backend_of, device
from playground.world.rank.reports import JOINED, Event, hearing

_recorder: Recorder | None = None
"""The active recorder of this process."""


@contextlib.contextmanager
def recorded(folder: Path, rank: int, run: str = "") -> Iterator[Recorder]:
    """Record this rank in this block, into `folder`; each step of a lesson in it is a phase. `run`
    is the content of run.json there."""
    with contextlib.suppress(OSError):  # the recorder reports it
        folder.mkdir(parents=True, exist_ok=True)
    global _recorder
    recorder = Recorder(folder, rank, device=str(device()))
    if run:
        with contextlib.suppress(OSError), open(create(folder / RUN), "w") as file:
            file.write(run)  # where that fails, the launcher writes it

    calls, training = CallRecorder(recorder), TrainingHooks(recorder)
    _recorder = recorder
    try:
        with (
            observing(calls),
            executed_by(RecordingExecutor(recorder, calls)),
            observing_devices(DeviceRecorder(recorder)),
            training.installed(),
            hearing(training.hear),
            hearing(partial(note_world, recorder)),
        ):
            yield recorder
    finally:
        _recorder = None
        recorder.stop()


def note_world(recorder: Recorder, event: Event) -> None:
    """Record the backend of a world that the program has formed, and the rank's device in it."""
    with contextlib.suppress(KeyError):  # it has several
        if JOINED in event:
            about = {"backend": backend_of().name, "device": str(device())}
            recorder.write(layout.WORLD, about)


def forget() -> None:
    """Stop recording in a process that was forked from a rank, such as a worker of a DataLoader."""
    global _recorder
    if _recorder:
        _recorder.let_go()
        _recorder = None


os.register_at_fork(after_in_child=forget)
