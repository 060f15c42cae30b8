"""Threads of ours in the process of a program. Each watches or waits, and neither calls an
operation nor releases one: the proof of a deadlock leaves them aside.

A program that looks at its threads must find its own. So these are not in `threading.enumerate()`,
and they take no signal: one that the program waits for with `signal.sigwait` reaches the program.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SYNCHRONOUS = {
    signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS,
    signal.SIGTRAP,
}  # fmt: skip
"""Signals that a thread causes itself. They are never blocked: `faulthandler` explains them."""


class OurThread:
    """A thread that neither a program nor the proof of a deadlock sees."""

    def __init__(
        self,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        *,
        name: str,
        daemon: bool = False,
    ) -> None:
        """`daemon`: the end of the process does not wait for it."""
        self.target = target
        self.args = args
        self.name = name
        self.daemon = daemon
        self.ident: int | None = None
        self.native_id = 0
        self.begun, self.ended = threading.Event(), threading.Event()

    def start(self) -> None:
        with signals_blocked():  # a thread inherits what its creator blocks
            _thread.start_new_thread(self.run, ())
        self.begun.wait()

    def run(self) -> None:
        self.ident, self.native_id = _thread.get_ident(), _thread.get_native_id()
        running[self.ident] = self
        self.begun.set()
        try:
            self.target(*self.args)
        finally:
            del running[self.ident]
            self.ended.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, `timeout` seconds at most."""
        self.ended.wait(timeout)


running: dict[int, OurThread] = {}
"""Those that run, by their `threading.get_ident()`."""
os.register_at_fork(after_in_child=running.clear)


def join_our_threads() -> None:
    """Wait for those that are no daemons."""
    for thread in [*running.values()]:
        if not thread.daemon:
            thread.join()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """In this block, no signal comes, and threads that are started never take one. What is sent
    meanwhile comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - SYNCHRONOUS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
