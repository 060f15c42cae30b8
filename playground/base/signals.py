"""Signals that end a program of ours: what they do to a launcher, and to a rank that somebody else
has started."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

from playground.base.threads import OurThread

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end, besides Ctrl-C: from its supervisor, or from a terminal that
is closed."""
PR_SET_PDEATHSIG = 1
DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that may be replaced. (`nohup` ignores SIGHUP, a shell script SIGINT for what it runs in
the background.)"""
stopping = threading.Event()
"""Set at once when such a signal comes, wherever the main thread is, in a program that has called
`exit_after`."""
postponed: dict[int, float] = {}
"""Signals that first leave such a program some time, in seconds: what it does until then is its own
affair. `end_postponement` empties it."""
_arrived = -1
"""In a program that has called `exit_after`: where its thread reads the signals that have come."""
_reading = threading.Lock()
"""Is held while that thread takes a signal, and decides what to do about it."""


def handle_termination() -> None:
    """From now on these signals raise: Ctrl-C `KeyboardInterrupt`, the others `SystemExit` with
    code 128 + number."""
    for number in TERMINATING:
        if signal.getsignal(number) in DEFAULT:
            signal.signal(number, exit_orderly)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. If a plain `KeyboardInterrupt` comes out of code that is given to `exec` as text, as
    a dataclass is made of, Python ends by SIGINT in the end, although the program has caught it and
    exits with a code of its own."""


class Terminated(SystemExit):
    """A signal of `TERMINATING` has come: SIGTERM or SIGHUP."""

    code: int


def interrupt(number: int, frame: FrameType | None) -> None:
    exit_if_importing(number, frame)
    raise Interrupted


def exit_orderly(number: int, frame: FrameType | None) -> None:
    exit_if_importing(number, frame)
    raise Terminated(128 + number)


def exit_if_importing(number: int, frame: FrameType | None) -> None:
    """Exit at once where an import is under way: it may run Python from within C++, which ends the
    process by SIGABRT, or drop whatever is raised and do without the module: torch without numpy,
    for example."""
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame:
        os.write(2, b"playground: interrupted\n" if number == signal.SIGINT and speaks() else b"")
        os._exit(128 + number)


def describe_signal(number: int) -> str:
    """Its name, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_to_system() -> None:
    """From now on these signals end the process at once, and Ctrl-C, which a person may repeat,
    does nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in TERMINATING:
        if signal.getsignal(number) == exit_orderly:
            signal.signal(number, signal.SIG_DFL)


def finish_first() -> None:
    """From now on these signals raise nothing: this program is about to end anyway, and has
    something left to do."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATING:
            if signal.getsignal(number) == exit_orderly:
                signal.signal(number, do_nothing)


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without ignoring it: it still wakes the thread of `exit_after`."""


def exit_after(seconds: float) -> None:
    """Have these signals end the process after `seconds`, wherever its main thread then stands.

    Python runs handlers in the main thread, between two of its instructions: never, while that
    waits in gloo for a peer that is gone. torchrun would wait for it, too, 30 s long.
    """
    global _arrived
    _arrived, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget_signals)
    OurThread(
        target=wait_and_exit, args=(_arrived, seconds), name="wait for signals", daemon=True
    ).start()


def forget_signals() -> None:
    """In a child of such a program: what is sent to it does not end its parent."""
    global _arrived
    signal.set_wakeup_fd(-1)
    _arrived = -1


def wait_and_exit(signals: int, seconds: float) -> NoReturn:
    first, end = 0, math.inf
    while True:
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        if not select.select([signals], [], [], left)[0]:
            break
        with _reading:
            number = os.read(signals, 1)[0]
            grace = postponed.get(number)
        if grace is not None:
            first, end = first or number, min(end, time.monotonic() + grace)
        elif number in (signal.SIGINT, *TERMINATING):
            first = number
            break
    stopping.set()
    time.sleep(seconds)
    os._exit(128 + first)


def end_postponement() -> None:
    """From now on no signal is postponed. One that has come before still is, even if the thread of
    `exit_after` has had no turn since."""
    while True:
        with _reading:
            if _arrived < 0 or not select.select([_arrived], [], [], 0)[0]:
                postponed.clear()
                return
        time.sleep(0.001)


def speaks() -> bool:
    """Whether this process says that it was interrupted: of the ranks that others have started, the
    first alone."""
    return os.environ.get("RANK", "0") == "0"
