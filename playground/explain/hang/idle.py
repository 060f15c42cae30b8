"""Threads of Python that only another thread of their process can wake: the worker of a pool that
has nothing to do, the feeder of an empty queue of multiprocessing's, the thread of a
`QueueListener`. Where all threads of a process wait like that, and its main thread waits for other
ranks, nothing in it acts any more. Does not import torch.

What counts is where a thread stands: in `Condition.wait` without a timeout, below which
`queue.Queue`, `Event`, `Barrier` and `concurrent.futures` wait, or in a call of C's `SimpleQueue`
that is known by its line in the standard library. No timer, no socket and no signal wakes such a
thread: handlers of signals run in the main thread. One thread wakes up by itself and does not act:
the one that pins a `DataLoader`'s batches, as long as it waits for the next.

That a thread is awake although it looks idle, as one that has just been notified, is told by the
kernel: see `Sleep`.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from playground.base.frames import is_standard

SWITCHES = re.compile(r"ctxt_switches:\s*(\d+)")
STATE = re.compile(r"State:\s*(\w)")
PINS = "torch.utils.data._utils.pin_memory"


@dataclass(frozen=True, slots=True)
class Sleep:
    """A thread that sleeps. Two looks have found the same one only if it has slept in between: to
    sleep again is a switch.

    Source: proc_pid_status(5)
    """

    thread: int
    switches: tuple[str, ...]


def find_sleep(thread: threading.Thread, frame: FrameType) -> Sleep | None:
    """How a thread sleeps that stands in this frame, and that only others can wake; None if
    something else may."""
    if not (waits_for_others(frame) or waits_for_a_batch(frame)):
        return None
    number = thread.native_id or 0
    with contextlib.suppress(OSError):  # it has ended
        status = Path(f"/proc/self/task/{number}/status").read_text()
        switches, state = SWITCHES.findall(status), STATE.search(status)
        if switches and state and state[1] == "S":
            return Sleep(number, tuple(switches))
    return None


def waits_for_others(frame: FrameType) -> bool:
    code = frame.f_code
    if code is threading.Condition.wait.__code__:
        return frame.f_locals.get("timeout") is None
    line = linecache.getline(code.co_filename, frame.f_lineno or 0)
    if code is find_code("concurrent.futures.thread", "_worker"):
        return "work_queue.get(block=True)" in line
    if code is find_code("logging.handlers", "QueueListener", "dequeue"):
        waits = "self.queue.get(block)" in line and bool(frame.f_locals.get("block"))
        return waits and type(frame.f_locals["self"].queue) is SimpleQueue
    return False


def waits_for_a_batch(frame: FrameType | None) -> bool:
    while frame is not None and is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != PINS:
        return False
    return "in_queue.get(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)


def find_code(module: str, *names: str) -> Any:
    """The code of a function in a module, if that has been imported."""
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return getattr(found, "__code__", None)
