"""Signals that end a program of ours: what they do to a launcher, and to a rank that somebody else has started."""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import threading
import time
import weakref
from functools import partial
from types import FrameType
from typing import NoReturn

from playground.runtime.forks import call_in_children

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end, besides Ctrl-C: from its supervisor, or from a terminal that is closed."""
DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that may be replaced. (`nohup` ignores SIGHUP, a shell script SIGINT for what it runs in the background.)"""
stopping = threading.Event()
"""Set at once when such a signal comes, wherever the main thread is, in a program that has called `exit_after`."""
postponed: dict[int, float] = {}
"""Signals that first leave such a program some time, in seconds: what it does until then is its own affair."""
RETRY_INTERVAL = 0.02
IMPORT_LIMIT = 0.3
"""Seconds that an import may go on after such a signal; then the process exits where it is."""


def handle_termination() -> None:
    """From now on these signals raise: Ctrl-C `KeyboardInterrupt`, the others `SystemExit` with code 128 + number."""
    for number in TERMINATING:
        if signal.getsignal(number) in DEFAULT:
            signal.signal(number, exit_orderly)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. If a plain `KeyboardInterrupt` comes out of code that is given to `exec` as text, as a dataclass is made
    of, Python ends by SIGINT in the end, although the program has caught it and exits with a code of its own."""


class Terminated(SystemExit):
    """One of the others."""

    code: int


def interrupt(number: int, frame: FrameType | None) -> None:
    raise_safely(Interrupted(), number, frame)


def exit_orderly(number: int, frame: FrameType | None) -> None:
    raise_safely(Terminated(128 + number), number, frame)


def raise_safely(error: Interrupted | Terminated, number: int, frame: FrameType | None) -> None:
    """Raise `error`, but not out of an import, and once more if it gets lost.

    An import may run Python from within C++, which ends the process by SIGABRT, or drop whatever is raised and do
    without the module: torch without numpy, for example. A destructor drops it too. So a timer calls the signal's
    handler again until there is such an exception.
    """
    raised, limit = weakref.ref(error), time.monotonic() + IMPORT_LIMIT

    def retry(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(number)
        if not callable(handler):
            cancel_retry()
        elif raised() is None and not is_importing(frame):
            handler(number, frame)
        elif raised() is None and time.monotonic() > limit:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # its next call would say it once more
            os.write(2, b"playground: interrupted\n" * (number == signal.SIGINT and speaks()))
            os._exit(128 + number)

    signal.signal(signal.SIGALRM, retry)
    signal.setitimer(signal.ITIMER_REAL, RETRY_INTERVAL, RETRY_INTERVAL)
    atexit.register(cancel_retry)
    try:
        if not is_importing(frame):
            raise error
    finally:
        del error  # its traceback holds this frame: together they would stay


def cancel_retry() -> None:
    """Cancel the retry: the exception has arrived, or is not to be raised any more."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way where this thread stands."""
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def describe_signal(number: int) -> str:
    """Its name, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def leave_to_system() -> None:
    """From now on these signals end the process at once, and Ctrl-C, which a person may repeat, does nothing."""
    cancel_retry()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in TERMINATING:
        if signal.getsignal(number) == exit_orderly:
            signal.signal(number, signal.SIG_DFL)


def finish_first() -> None:
    """From now on these signals raise nothing: this program is about to end anyway, and has something left to do."""
    if threading.current_thread() is threading.main_thread():
        cancel_retry()
        for number in TERMINATING:
            if signal.getsignal(number) == exit_orderly:
                signal.signal(number, do_nothing)


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without ignoring it: it still wakes the thread of `exit_after`."""


def exit_after(seconds: float) -> None:
    """Have these signals end the process after `seconds`, wherever its main thread then stands.

    Python runs handlers in the main thread, between two of its instructions: never, while that waits in gloo for a
    peer that is gone. torchrun would wait for it, too, 30 s long.
    """
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    call_in_children(partial(signal.set_wakeup_fd, -1))  # what is sent to a child does not end this process
    threading.Thread(target=wait_and_exit, args=(signals, seconds), name="wait for signals", daemon=True).start()


def wait_and_exit(signals: int, seconds: float) -> NoReturn:
    first, end = 0, math.inf
    while True:
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        if not select.select([signals], [], [], left)[0]:
            break
        number = os.read(signals, 1)[0]
        if (grace := postponed.get(number)) is not None:
            first, end = first or number, min(end, time.monotonic() + grace)
        elif number in (signal.SIGINT, *TERMINATING):
            first = number
            break
    stopping.set()
    time.sleep(seconds)
    os._exit(128 + first)


def speaks() -> bool:
    """Whether this process says that it was interrupted: of the ranks that others have started, the first alone."""
    return os.environ.get("RANK", "0") == "0"
