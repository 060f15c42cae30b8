"""Preemption: a world is asked to end soon, stores where it is, and ends by itself.

Slurm sends SIGUSR1 before the time of a job is up (`--signal=B:USR1@60`), a cloud SIGTERM before it takes a machine
back. A launch that grants a `grace` passes the signal on to its ranks, where `preempted()` says so. When all have seen
it, which they must agree upon, each stores its state and raises `Preempted`.

Under torchrun each rank hears the signal from its agent. That one sends SIGTERM before every restart, too: where a rank
was lost before, no agreement is possible, and the attempt raises the error that tells of the loss.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from playground.runtime import signals
from playground.runtime.errors import Preempted

PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals that announce a preemption, where one is prepared for."""
_asked: list[signal.Signals] = []


def preempted() -> signal.Signals | None:
    """The signal by which this rank's world has been asked to end soon; None if it has not been.

    Ranks learn of it one after the other: they must agree before one of them leaves a collective out.
    """
    return _asked[0] if _asked else None


def ask_to_end(number: int) -> None:
    """In a rank: from now on, `preempted` names this signal, unless it names another one."""
    if not _asked:
        _asked.append(signal.Signals(number))


def begin_unasked() -> None:
    """In a rank: the next work begins without a request to end."""
    _asked.clear()


def run_until_preempted(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn(*args)` returns or, if it raises `Preempted`, that: the world it ran in is as good as ever."""
    try:
        return fn(*args)
    except Preempted as preemption:
        return preemption.with_traceback(None)  # which holds all that the function had


def raise_if_preempted(results: Sequence[Any]) -> None:
    """Raise the `Preempted` that a rank has handed in as its result, if one has."""
    for result in results:
        if isinstance(result, Preempted):
            raise result


@contextlib.contextmanager
def handle(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let `handler` handle these signals meanwhile, but those that the program itself handles. (In the main thread.)"""
    replaceable = (signal.SIG_DFL, signals.exit_orderly, signals.decline_preemption)
    replaced = {number: old for number in numbers if (old := signal.getsignal(number)) in replaceable}
    try:
        for number in replaced:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)


def leave_to_launcher(preemptible: bool) -> None:
    """In a rank that we have launched: from now on, until it gets other work, SIGUSR1 does nothing, and neither does
    SIGTERM, if it is `preemptible`. The launcher passes them on.

    Some job managers send them to every process of a job.
    """
    for number in PREEMPTING:
        is_ours = preemptible or number != signal.SIGTERM
        signal.signal(number, signals.do_nothing if is_ours else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTING)


@contextlib.contextmanager
def heed_signals(grace: float | None) -> Iterator[None]:
    """In a rank that somebody else has started: let these signals ask it to end meanwhile, `grace` seconds before
    they do end it. A repetition changes nothing: torchrun passes on what its ranks may have got already.

    With None, they do what they did before.
    """
    if grace is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    begin_unasked()
    signals.postponed.update(dict.fromkeys(PREEMPTING, grace))
    try:
        with handle(PREEMPTING, lambda number, frame: ask_to_end(number)):
            yield
    finally:
        signals.postponed.clear()


class PreemptionNotice:
    """A launcher's ear for these signals while it is entered. The first one is for the ranks, which have `grace`
    seconds to end then; the second one ends the launch. With None, the signals do what they did before."""

    def __init__(self, grace: float | None) -> None:
        self.grace, self.launcher = grace, os.getpid()
        self.signal: signal.Signals | None = None
        """The one that has come."""
        self.deadline = math.inf
        self.ears: list[int] = []
        """Descriptors to `wait` for: ready when a signal has come."""
        self.exits = contextlib.ExitStack()

    def __enter__(self) -> PreemptionNotice:
        if self.grace is not None and threading.current_thread() is threading.main_thread():
            ear, self.bell = os.pipe()
            self.ears.append(ear)
            for descriptor in (ear, self.bell):
                self.exits.callback(os.close, descriptor)
            self.exits.enter_context(handle(PREEMPTING, self.hear))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.exits.close()
        if kind is signals.Terminated:
            signals.cancel_retry()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.signal is not None or os.getpid() != self.launcher:  # a second one, or one that is sent to a child
            signals.exit_orderly(number, frame)
        assert self.grace is not None
        self.signal, self.deadline = signal.Signals(number), time.monotonic() + self.grace
        os.write(self.bell, b"!")

    @property
    def seconds_left(self) -> float:
        """Seconds until the ranks must have ended; infinite without a signal."""
        return max(0.0, self.deadline - time.monotonic())

    def take(self) -> signal.Signals | None:
        """The signal, for the ranks: once. Ends this process, as the signal would, if they have had their time."""
        if self.signal is None:
            return None
        if self.seconds_left == 0:
            logging.getLogger("playground").warning("%s: no end within %g s", self.signal.name, self.grace)
            sys.exit(128 + self.signal)
        new = bool(self.ears)
        self.ears.clear()  # it stays ready
        return self.signal if new else None
