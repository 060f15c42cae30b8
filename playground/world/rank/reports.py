"""What a rank reports of its progress, and who hears it: the launcher, and whoever listens in the
rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

Event = dict[str, Any]
"""A rank's report: names and values of its choice."""
Progress = Callable[[int, Event], None]
"""Takes (rank, event): what a rank reports of its progress."""
JOINED = "joined"
"""What a rank reports when its program has formed a process group, and the launcher of one whose
child processes may have."""
BREAKPOINT = "breakpoint"
"""What a rank reports, with the line, when it has come to a breakpoint at which a person is
asked."""
QUIT = "was ended in its debugger"
"""What is said of a rank whose debugger a person has left."""
HUNG_UP = "hung up"
"""What the launcher reports of a rank whose program has closed the line, or has ended its process
before it has returned: it may have had more to report."""
_listeners: list[Callable[[Event], None]] = []
_reporting = set[int]()
"""Threads that report now."""
os.register_at_fork(after_in_child=_listeners.clear)  # a child of a rank is not the rank


def report(**event: Any) -> None:
    """Tell whoever started this rank how far it is (also: that it is alive). Does nothing without a
    listener."""
    thread = threading.get_ident()
    _reporting.add(thread)
    try:
        for listener in _listeners:
            listener(event)
    finally:
        _reporting.discard(thread)


def is_reporting() -> bool:
    """Whether this thread reports now. A signal's handler that has interrupted it may not: it would
    wait for the line, which this thread holds."""
    return threading.get_ident() in _reporting


def report_to(listener: Callable[[Event], None]) -> None:
    """From now on, hand this rank's reports to `listener`."""
    _listeners[:] = [listener]


@contextlib.contextmanager
def hearing(listener: Callable[[Event], None]) -> Iterator[None]:
    """In this block, hand this rank's reports to `listener`, too."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
