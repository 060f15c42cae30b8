"""A rank as a process: it begins and ends as a script does that torchrun starts, although it is a
fork.

Its generators of random numbers are seeded afresh (`generators`), as are those of a new process.

| at its end                  | as in any process of Python                                        |
|-----------------------------|--------------------------------------------------------------------|
| exit code                   | 0 when its function returns and after `sys.exit()`; that of        |
|                             | `sys.exit(code)`; 1 after an exception and `sys.exit("message")`   |
| threads, atexit, finalizers | threads that are no daemons are waited for; what is registered     |
|                             | with `atexit` runs, and so do `weakref.finalize`, `logging` and    |
|                             | `multiprocessing`, which end by it                                 |
| its modules and globals     | taken down by the interpreter: `__del__` runs, files of gzip,      |
|                             | zipfile, shelve, tempfile are closed                               |
| an exception                | `sys.excepthook` is called, if it is the program's own             |
| what it has written         | flushed: files that are still open, Python's streams and C's stdio |
| what it has started         | ends with a rank that fails or is ended: its process group gets    |
|                             | SIGTERM, then SIGKILL                                              |

Only what was imported before the fork is not taken down: with torch that takes a tenth of a second.
So an object of the program's that is known there alone, as a hook of torch's, is not destroyed.
What forks of one process share is not undone either: the seed of its hashes, which orders sets of
strings.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, NoReturn

from playground.base.errors import Preempted
from playground.base.forks import Descriptor, close_in_children, move_up
from playground.base.signals import end_with_parent
from playground.base.threads import join_our_threads
from playground.base.upstream import (
    detach_finalizers,
    end_interpreter,
    find_own_excepthook,
    join_threads,
    renew_main_thread,
    run_exit_functions,
)
from playground.world.rank.generators import seed_generators

FROM_TERMINAL = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""A terminal sends them to every process of the group in its foreground. No rank is in that group:
the launcher alone hears them, and decides."""
_before: dict[str, ModuleType] = {}
"""The modules that were imported before this process was forked."""
_kept: list[Descriptor] = []
"""This process's own end of the lifeline, until it ends."""
BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def begin(lifeline: int) -> None:
    """In a fork of the server, which has blocked signals: be a process of its own, leading its own
    group. Its group is killed when the launcher is gone while this process is there, and it when
    the server is: its program may close all descriptors."""
    os.setpgid(0, 0)
    end_with_parent()
    # The kernel signals one owner for each opened file.
    own = move_up(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
    kill_at_end_of_file(own, -os.getpid())
    _kept.append(Descriptor(own))
    close_in_children(*_kept)  # a child may outlive this process, and the launcher
    os.close(lifeline)
    # to ignore a signal is to forget one that came while this was in the server's group
    for number in FROM_TERMINAL:
        signal.signal(number, signal.signal(number, signal.SIG_IGN))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_TERMINAL)
    renew_main_thread()
    seed_generators()
    _before.update(sys.modules)


def lead_session() -> None:
    """Lead a session, which has no terminal of its own: a background process of one that has is
    stopped when it reads from that terminal."""
    os.setpgid(0, os.getpgid(os.getppid()))  # who leads a group cannot lead a session
    os.setsid()


def kill_at_end_of_file(pipe: int, owner: int) -> None:
    """Have the kernel kill `owner`, a process or (negative) a group, when the other end of `pipe`
    is closed everywhere.

    Whatever it is doing then: importing, inside C code that holds the GIL, stopped.
    Source: F_SETSIG in https://man7.org/linux/man-pages/man2/fcntl.2.html
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], 0):  # the end came first
        os._exit(1)


def find_lifelines(pid: int) -> tuple[set[str], set[str]]:
    """The pipes that a process writes to, and those whose end kills it (`kill_at_end_of_file`).

    Source: /proc/pid/fdinfo in https://man7.org/linux/man-pages/man5/proc_pid_fdinfo.5.html
    """
    written, needed = set[str](), set[str]()
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for number in os.listdir(f"/proc/{pid}/fd"):
            name = os.readlink(f"/proc/{pid}/fd/{number}")
            if name.startswith("pipe:"):
                with open(f"/proc/{pid}/fdinfo/{number}") as lines:
                    flags = next(int(line.split()[1], 8) for line in lines if "flags" in line)
                if flags & os.O_ASYNC:
                    needed.add(name)
                elif flags & os.O_WRONLY:
                    written.add(name)
    return written, needed


def run_function(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn(*args)`: None if it ends by `sys.exit()` or `sys.exit(0)`. A process that
    it forks, and that comes back from it, ends here."""
    rank = os.getpid()
    try:
        result = fn(*args)
    except BaseException as error:
        if os.getpid() != rank:
            end(error)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return None
        if not isinstance(error, SystemExit | Preempted) and (hook := find_own_excepthook()):
            hook(type(error), error, error.__traceback__)
        raise
    if os.getpid() != rank:
        end()
    return result


def end(error: BaseException | None = None) -> NoReturn:
    """End this process as the interpreter ends a script that has returned, or has raised
    `error`."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code != error.code and error.code is not None:
            print(error.code, file=sys.stderr)
    elif error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if error:
        forget_frames(error)
    exit_orderly(code)


def forget_frames(error: BaseException) -> None:
    """Let go of what is known only where `error`, and those before it, were raised."""
    known: list[BaseException] = [error]
    for each in known:
        each.__traceback__ = None
        before = (each.__cause__, each.__context__)
        known += [one for one in before if one and all(one is not other for other in known)]


def exit_orderly(code: int) -> NoReturn:
    """End this process with this code as the interpreter does."""
    finish()
    end_interpreter(code, _before)


def finish() -> None:
    """What an orderly end does while everything is still there. (A second call has nothing left to
    do.)"""
    join_threads()
    join_our_threads()
    detach_finalizers()
    run_exit_functions()
    flush()


def flush() -> None:
    """Hand over what has been written so far, to streams and to files that are open."""
    # which takes a while
    objects = gc.get_objects() if any(map(is_written, os.listdir("/proc/self/fd"))) else []
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, BUFFERED)}
    for stream in (sys.stdout, sys.stderr, *(each for each in objects if type(each) in kinds)):
        try:
            stream.flush()
        except Exception:  # it is closed, or full, or nobody reads it
            continue
    ctypes.CDLL(None).fflush(None)


def has_children(kind: int, group: int = 0) -> bool:
    """Whether this process has child processes (`P_ALL`), or one in that group (`P_PGID`), ended
    ones that were not waited for included: until then their numbers belong to no others."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(kind, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def is_written(number: str) -> bool:
    """Whether a file with a name is open for writing by this descriptor."""
    with contextlib.suppress(OSError):  # closed by now
        name = os.readlink(f"/proc/self/fd/{number}")
        if name.startswith("/") and not name.startswith(("/memfd:", os.devnull)):
            return bool(fcntl.fcntl(int(number), fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR))
    return False
