"""Preemption: a world is asked to end soon, stores where it is, and ends by itself.

A cloud sends SIGTERM before it takes a machine back, and so does Slurm before it ends a job. A
launch that grants a `grace` passes that on to its ranks, where `preempted()` says so. When all have
seen it, which they must agree upon, each stores its state and raises `Preempted`.

Under torchrun each rank gets the signal from its agent. That one sends SIGTERM before every
restart, too: where a rank was lost before, no agreement is possible, and the attempt raises the
error that names the loss.
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

from playground.base import signals
from playground.base.errors import Preempted

_is_requested = False


def preempted() -> bool:
    """Whether this rank's world has been asked to end soon.

    Ranks learn of it one after the other: they must agree before one of them leaves a collective
    out.
    """
    return _is_requested


def request_preemption() -> None:
    """In a rank: from now on, it is `preempted`."""
    global _is_requested
    _is_requested = True


def clear_preemption() -> None:
    """In a rank: the next function begins without a request to end."""
    global _is_requested
    _is_requested = False


def run_until_preempted(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn(*args)` or, if it raises `Preempted`, that: the world it ran in is as good
    as ever."""
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
def handle(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let `handler` handle this signal in the block. (In the main thread, unless the program itself
    handles it.)"""
    before = signal.getsignal(number)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or before not in (signal.SIG_DFL, signals.exit_orderly):
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def leave_to_launcher(preemptible: bool) -> None:
    """In a rank that we have launched: from now on, until it gets other work, SIGTERM does nothing
    if it is `preemptible`. The launcher passes it on.

    Some job managers send it to every process of a job.
    """
    signal.signal(signal.SIGTERM, signals.do_nothing if preemptible else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


_masks: dict[int, set[int]] = {}
"""By thread that forks, what it has blocked."""


def hold_back() -> None:
    """Before a fork: SIGTERM waits until the new process is ready for it."""
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def let_through() -> None:
    """After the fork."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


def leave_to_system() -> None:
    """In a process that a preemptible rank has forked: SIGTERM ends it, as `terminate()` means."""
    if signal.getsignal(signal.SIGTERM) is signals.do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    let_through()


os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=leave_to_system)


@contextlib.contextmanager
def preempt_on_sigterm(grace: float | None) -> Iterator[None]:
    """In a rank that somebody else has started: in the block, SIGTERM asks it to end, and ends it
    `grace` seconds later. A repetition changes nothing: torchrun passes on what its ranks may have
    got already.

    With None, it does what it did before.
    """
    if grace is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    clear_preemption()
    signals.postponed[signal.SIGTERM] = grace
    try:
        with handle(signal.SIGTERM, lambda number, frame: request_preemption()):
            yield
    finally:
        signals.end_postponement()


class PreemptionNotice:
    """A launcher's handler of SIGTERM, in `await_preemption`."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.launcher = os.getpid()
        self.has_come = self.is_passed_on = False
        self.deadline = math.inf

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # a second one, or one that is sent to a child
        if self.has_come or os.getpid() != self.launcher:
            signals.exit_orderly(number, frame)
        self.has_come = True
        self.deadline = time.monotonic() + self.grace

    @property
    def seconds_left(self) -> float:
        """Seconds until the ranks must have ended; infinite without a signal."""
        return max(0.0, self.deadline - time.monotonic())

    def take(self) -> bool:
        """Whether the ranks are to be asked to end: once. Ends this process, as the signal would,
        if they have had their time."""
        if self.seconds_left == 0:
            logging.getLogger("playground").warning("SIGTERM: no end within %g s", self.grace)
            sys.exit(128 + signal.SIGTERM)
        is_new = self.has_come and not self.is_passed_on
        self.is_passed_on = self.has_come
        return is_new


@contextlib.contextmanager
def await_preemption(grace: float | None) -> Iterator[PreemptionNotice]:
    """In this block the first SIGTERM leaves the ranks `grace` seconds to end, and the second one
    ends the launch. With None, the signal does what it did before."""
    notice = PreemptionNotice(grace or 0.0)
    if grace is None:
        yield notice
        return
    with handle(signal.SIGTERM, notice.on_signal):
        yield notice
