"""The launcher's end of a fork server: start it, ask it for processes, notice when it is stopped or dead, end it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
from multiprocessing.connection import wait
from multiprocessing.spawn import get_executable

from playground.runtime.errors import ForkServerFailed
from playground.runtime.fork_server import LAUNCHER_ONLY, MESSAGE, REFUSED
from playground.runtime.signals import describe_signal

START_LIMIT = 300.0
"""Seconds the server has to answer: for a request that has to wait for its imports, from a cold disk."""
STOPPED_LIMIT = 5
"""Times, a second apart, that the server is found stopped before that is an error. (After Ctrl-Z and `fg` this process
may be awake a moment before the server is.)"""
ENDED = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
END_LIMIT = 0.5
"""Seconds the server has to say that it ends, before it is killed."""


class ForkServerClient:
    """A fork server that imports `modules`, looking for them in `path`. This returns at once; requests wait for the
    imports."""

    def __init__(self, path: list[str], modules: list[str]) -> None:
        self.launcher = os.getpid()
        self.ready = False
        self.lost = False
        """Whether it has let go of a rank without a word: it is dead, even if the kernel is still closing its files."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as ours:
            self.requests, theirs = socket.socketpair()
            ours.enter_context(self.requests)
            passed_on.enter_context(theirs)
            end, self.lifeline = os.pipe()
            ours.callback(os.close, self.lifeline)
            passed_on.callback(os.close, end)
            lifeline = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3)  # not the number of a stream that is closed here
            passed_on.callback(os.close, lifeline)
            self.pid = spawn(command(lifeline, path, modules), stdin=theirs.fileno(), kept=lifeline)
            ours.pop_all()

    def fork(self, fds: list[int]) -> tuple[int, int, int]:
        """A new process that inherits `fds`: its id, the descriptor its exit code is read from, and the one to write
        to what it is to run.

        Raises `ForkServerFailed` if there will be none: in a line, why, and what to do.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            status, their_status = os.pipe()
            theirs.callback(os.close, their_status)
            ours.callback(os.close, status)
            their_work, work = os.pipe()
            theirs.callback(os.close, their_work)
            ours.callback(os.close, work)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: no answer will say so
                socket.send_fds(self.requests, [b"\0"], [their_status, their_work, *fds])
            theirs.close()
            pid = self.await_answer(status)
            ours.pop_all()
        return pid, status, work

    def await_answer(self, status: int) -> int:
        """The process id that the server answers with."""
        times_stopped = seconds = 0
        while not wait([status], 1.0):
            seconds += 1
            times_stopped = times_stopped + 1 if self.is_stopped() else 0
            if times_stopped == STOPPED_LIMIT:
                self.check_not_stopped()
            if seconds >= START_LIMIT:
                raise ForkServerFailed(f"has not answered for {START_LIMIT:g} s: is the disk that torch lies on well?")
        answer = os.read(status, MESSAGE.size)
        if not answer:
            raise ForkServerFailed(self.describe_end())
        if (pid := MESSAGE.unpack(answer)[0]) == REFUSED:
            with open(status, "rb", closefd=False) as reason:
                raise ForkServerFailed(reason.read().decode())
        self.ready = True
        return pid

    def is_stopped(self) -> bool:
        return self.state() == os.CLD_STOPPED

    def check_not_stopped(self) -> None:
        if self.is_stopped():
            raise ForkServerFailed(f"is stopped (SIGSTOP): kill -CONT {self.pid} lets it go on")

    def is_running(self) -> bool:
        """Whether it can be asked: by this process, and not by one that has been forked from it."""
        if self.lost or self.launcher != os.getpid() or self.state() in ENDED:
            return False
        return not wait([self.requests], 0)  # hung up: it is being ended, which takes the kernel a while

    def state(self) -> int | None:
        """`os.CLD_STOPPED`, one of the codes for its end, or None while it runs."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has waited for it
            return os.CLD_EXITED
        return found.si_code if found else None

    def describe_end(self) -> str:
        """How it ended, all its answers having ended with it."""
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if found and found.si_code != os.CLD_EXITED:
                return f"was killed by {describe_signal(found.si_status)}: out of memory? (ulimit -v, dmesg)"
        return "has exited: out of memory? (ulimit -v)"

    def end(self) -> None:
        """End it; what holds the other end of the lifeline (its ranks, if there are any) ends with it."""
        with self.requests:
            if self.launcher == os.getpid() and not (self.ready and self.is_running() and self.ends_by_itself()):
                self.kill()
        os.close(self.lifeline)
        if self.launcher == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)  # the kernel takes a tenth of a second to put its memory away

    def kill(self) -> None:
        """End it at once. (A child that nobody has waited for: the number cannot be anybody else's.)"""
        if self.state() not in ENDED:
            os.kill(self.pid, signal.SIGKILL)

    def ends_by_itself(self) -> bool:
        """Whether it says that it does. It may have something to write then (coverage, for example)."""
        self.requests.shutdown(socket.SHUT_WR)
        return bool(wait([self.requests], END_LIMIT))

    def read_exit_code(self, status: int, unknown: int) -> int:
        """The exit code of a process that the server has waited for; `unknown` if it died before."""
        message = os.read(status, MESSAGE.size)
        self.lost = self.lost or not message
        return int(MESSAGE.unpack(message)[0]) if message else unknown


def spawn(words: list[str], stdin: int, kept: int) -> int:
    """Start a program that has nothing of ours open but standard streams and `kept`; its process id."""
    streams = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, kept, kept)]
    try:
        return os.posix_spawn(words[0], words, os.environ, file_actions=streams, setsigmask=LAUNCHER_ONLY)
    except OSError as error:
        raise ForkServerFailed(f"cannot be started ({error.strerror}): is there a limit (ulimit -u, -v)?") from error


def command(lifeline: int, path: list[str], modules: list[str]) -> list[str]:
    """What runs the server. It looks for modules where this process does, from its first import on: not in a working
    folder that happens to hold a `queue.py`."""
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from playground.runtime.fork_server import serve; serve({lifeline}, {modules!r})"
    )
    return [os.fsdecode(get_executable()), *subprocess._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
