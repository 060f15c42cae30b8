"""The launcher's end of a fork server: start it, ask it for processes, notice when it is stopped or dead, end it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from multiprocessing.connection import wait
from multiprocessing.spawn import get_executable

from playground.runtime.errors import ForkServerFailed
from playground.runtime.fork_server import LAUNCHER_ONLY, MESSAGE, NO_DESCRIPTOR_LEFT, REFUSED
from playground.runtime.forks import close_in_children
from playground.runtime.signals import describe_signal

MAX_ANSWER = 2**14
"""Bytes of an answer: the reason for a refusal can be long, the kernel does not cut it."""
START_LIMIT = 300.0
"""Seconds the server has to answer: for a request that has to wait for its imports, from a cold disk."""
STOPPED_LIMIT = 5.0
"""Seconds that the server may be stopped before it counts as lost. (After Ctrl-Z and `fg` this process may be awake a
moment before the server is.)"""
ENDED = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
END_LIMIT = 0.5
"""Seconds the server has to say that it ends, before it is killed."""
PUT_AWAY_LIMIT = 5.0
"""Seconds that the kernel may take to put the memory of a process away, between closing its files and its end."""


class ForkServerClient:
    """A fork server that imports `modules`, looking for them in `path`. This returns at once; requests wait for the
    imports."""

    def __init__(self, path: list[str], modules: list[str]) -> None:
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
            self.pidfd = os.pidfd_open(self.pid)
            ours.pop_all()
        close_in_children(self)

    def fork(self, fds: list[int]) -> tuple[int, int, int, int]:
        """A new process that inherits `fds`: its id, a pidfd of it, the descriptor its exit code is read from, and the
        one to write to what it is to run.

        Raises `ForkServerFailed` if there will be none: in a line, why, and what to do.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            status, their_status = socket.socketpair(type=socket.SOCK_SEQPACKET)
            theirs.enter_context(their_status)
            ours.enter_context(status)
            their_work, work = os.pipe()
            theirs.callback(os.close, their_work)
            ours.callback(os.close, work)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: no answer will say so
                socket.send_fds(self.requests, [b"\0"], [their_status.fileno(), their_work, *fds])
            theirs.close()
            pid, pidfd = self.await_answer(status)
            ours.pop_all()
        return pid, pidfd, status.detach(), work

    def await_answer(self, status: socket.socket) -> tuple[int, int]:
        """The process id that the server answers with, and the pidfd."""
        end = time.monotonic() + START_LIMIT
        while not wait([status], 1.0):
            if self.is_stopped() and not self.can_be_asked():
                raise ForkServerFailed(f"is stopped (SIGSTOP): kill -CONT {self.pid} lets it go on")
            if time.monotonic() >= end:
                raise ForkServerFailed(f"has not answered for {START_LIMIT:g} s: is the disk that torch lies on well?")
        answer, pidfds, *_ = socket.recv_fds(status, MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
        if not answer:
            raise ForkServerFailed(self.describe_end())
        if (pid := MESSAGE.unpack_from(answer)[0]) == REFUSED:
            raise ForkServerFailed(answer[MESSAGE.size :].decode())
        self.ready = True
        return pid, pidfds[0]

    def is_stopped(self) -> bool:
        return self.state() == os.CLD_STOPPED

    def is_running(self) -> bool:
        if self.lost or self.state() is not None:
            return False
        return not wait([self.requests], 0)  # hung up: it is being ended, which takes the kernel a while

    def can_be_asked(self) -> bool:
        """Whether it is running. If it is stopped, wait `STOPPED_LIMIT` seconds for it to go on."""
        end = time.monotonic() + STOPPED_LIMIT
        while self.is_stopped() and time.monotonic() < end:
            time.sleep(0.02)
        return self.is_running()

    def state(self) -> int | None:
        """`os.CLD_STOPPED`, one of the codes for its end, or None while it runs."""
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has waited for it
            return os.CLD_EXITED
        return found.si_code if found else None

    def describe_end(self) -> str:
        """How it ended, having hung up without an answer."""
        if not wait([self.pidfd], PUT_AWAY_LIMIT):
            return NO_DESCRIPTOR_LEFT  # not one, to answer with
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            if found and found.si_code != os.CLD_EXITED:
                return f"was killed by {describe_signal(found.si_status)}: out of memory? (ulimit -v, dmesg)"
        return "has exited: out of memory? (ulimit -v)"

    def end(self) -> None:
        """End it; what holds the other end of the lifeline (its ranks, if there are any) ends with it."""
        with self.requests:
            if not (self.ready and self.is_running() and self.ends_by_itself()):
                with contextlib.suppress(ProcessLookupError):  # somebody else has waited for it
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # the kernel takes a tenth of a second to put its memory away
        self.close()

    def close(self) -> None:
        """Let go of it. If nobody else holds on to it, it ends, and its ranks do."""
        self.requests.close()
        os.close(self.lifeline)
        os.close(self.pidfd)

    def ends_by_itself(self) -> bool:
        """Whether it says that it does. It may have something to write then (coverage, for example)."""
        self.requests.shutdown(socket.SHUT_WR)
        return bool(wait([self.requests], END_LIMIT))

    def read_exit_code(self, status: int) -> int | None:
        """The exit code of a process that the server has waited for; None if it died before."""
        message = os.read(status, MESSAGE.size)
        self.lost = self.lost or not message
        return int(MESSAGE.unpack(message)[0]) if message else None


def spawn(words: list[str], stdin: int, kept: int) -> int:
    """Start a program that has nothing of ours open but standard streams and `kept`; its process id."""
    files: list[tuple[int, ...]] = [(os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in find_inheritable()]
    files += [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, kept, kept)]
    try:
        return os.posix_spawn(words[0], words, os.environ, file_actions=files, setsigmask=LAUNCHER_ONLY)
    except OSError as error:
        raise ForkServerFailed(f"cannot be started ({error.strerror}): is there a limit (ulimit -u, -v)?") from error


def find_inheritable() -> list[int]:
    """The descriptors, besides standard streams, that a program inherits from this process if nobody closes them."""
    found = []
    with contextlib.suppress(OSError):  # no /proc
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed by now
                if descriptor > 2 and os.get_inheritable(descriptor):
                    found.append(descriptor)
    return found


def command(lifeline: int, path: list[str], modules: list[str]) -> list[str]:
    """What runs the server. It looks for modules where this process does, from its first import on: not in a working
    folder that happens to hold a `queue.py`."""
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from playground.runtime.fork_server import serve; serve({lifeline}, {modules!r})"
    )
    return [os.fsdecode(get_executable()), *subprocess._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
