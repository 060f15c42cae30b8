"""The launcher's end of the fork server, a process that has imported torch once and forks itself
for each rank: its start, and requests to it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from playground.base.errors import ForkServerFailed
from playground.base.forks import close_in_children, receive_fds
from playground.base.imports import read_once
from playground.base.process_attributes import Inheritance, read_inheritance
from playground.base.process_status import is_stopped
from playground.base.upstream import (
    find_modules_as_here,
    is_importing_program,
    python_command,
)
from playground.world.launcher import child_processes
from playground.world.launcher.fork_server import NO_ROOM, REFUSED
from playground.world.launcher.fork_starter import MESSAGE

if TYPE_CHECKING:
    from playground.world.launcher.forked_process import ForkedProcess

MAX_ANSWER = 2**14
"""Bytes of an answer: the reason for a refusal can be long, the kernel does not cut it."""
START_LIMIT = 300.0
"""Seconds the server has to answer, and a new process to come up: a cold disk reads torch
slowly."""
LOOK_INTERVAL, STOPPED_LOOKS = 1.0, 5
"""Seconds between two looks at a server that does not answer, and the number of looks that find it
stopped, or its starter, before it counts as lost. (After Ctrl-Z and `fg` this process may be awake
a moment before the server is.)"""
NO_ANSWER = f"has not answered for {START_LIMIT:g} s: is the disk that torch lies on well?"
ENDED = "has ended without an answer: out of memory? (ulimit -v, dmesg)"
END_LIMIT = 1.0
"""Seconds the server has to say that it ends, before it is killed; and to hang up, if it has
dropped a request."""
UNGUARDED = 97
"""Exit code of a rank that met a launch() while importing the user's script."""
PRELOADED = [
    "torch.distributed",
    "playground.world.rank.program_groups",
    "playground.world.rank.debugger",
]
_settings: dict[str, str] = {}
_servers: list[ForkServerClient] = []
"""The newest is the last. An earlier one stays as long as it has processes."""
_lock = threading.Lock()


class ForkServerClient:
    """A fork server that imports `modules`, looking for them in `path`, with `settings` in its
    environment. This returns at once; requests wait for the imports.

    It is no child of this process, whose program may wait for all of its own (`os.wait`): the child
    that starts it tells its process id and ends.
    """

    def __init__(self, path: list[str], modules: list[str], settings: dict[str, str]) -> None:
        self.ready = False
        self.pid = 0
        """Its process id: 0 until its starter has told that."""
        self.processes: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()
        self.caller = read_caller()
        """What this process was like, which it has from it."""
        with contextlib.ExitStack() as passed_on, contextlib.ExitStack() as ours:
            self.requests, theirs = socket.socketpair()
            ours.enter_context(self.requests)
            passed_on.enter_context(theirs)
            end, self.lifeline = os.pipe()
            ours.callback(os.close, self.lifeline)
            passed_on.callback(os.close, end)
            # not the number of a stream that is closed here
            lifeline = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3)
            passed_on.callback(os.close, lifeline)
            # It looks for modules where this process does, from the first import on: not in a
            # working folder that happens to hold a `queue.py`.
            code = (
                f"import sys; sys.path[:] = {path!r}; "
                "from playground.world.launcher.fork_starter import fork_server; fork_server(); "
                "from playground.world.launcher.fork_server import serve; "
                f"serve({lifeline}, {modules!r}, {settings!r})"
            )
            self.starter = child_processes.spawn(
                python_command(code), stdin=theirs.fileno(), kept=lifeline
            )
            ours.pop_all()
        close_in_children(self)

    def meet(self) -> None:
        """Wait until its process id is known. Raises `ForkServerFailed` if it has ended before, or
        its starter has, or is stopped."""
        if self.pid:
            return
        self.await_message(self.requests)
        message, pidfds, _ = receive_fds(self.requests, MESSAGE.size, 1)
        self.wait_for_starter()
        if not pidfds:
            raise ForkServerFailed(ENDED)
        self.pid = MESSAGE.unpack(message)[0]
        self.pidfd = pidfds[0]

    def is_starting(self) -> bool:
        """Whether its starter has not ended."""
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            return not os.waitid(os.P_PID, self.starter, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False

    def wait_for_starter(self) -> None:
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(self.starter, 0)

    def fork(self, fds: list[int], streams: int = 0) -> tuple[int, int, int, int]:
        """A new process that inherits `fds`, of which the first `streams` become its stdout and
        stderr: its id, a pidfd of it, the descriptor its exit code is read from, and the one to
        write to what it is to run.

        Raises `ForkServerFailed` if there will be none: in a line, why, and what to do.
        """
        self.meet()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            status, their_status = socket.socketpair(type=socket.SOCK_SEQPACKET)
            theirs.enter_context(their_status)
            ours.enter_context(status)
            their_work, work = os.pipe()
            theirs.callback(os.close, their_work)
            ours.callback(os.close, work)
            # it is dead: no answer will say so
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(
                    self.requests, [bytes([streams])], [their_status.fileno(), their_work, *fds]
                )
            theirs.close()
            pid, pidfd = self.await_answer(status)
            ours.pop_all()
        return pid, pidfd, status.detach(), work

    def await_message(self, source: socket.socket) -> None:
        """Wait for what the server says next, or its starter. Raises `ForkServerFailed` where that
        takes too long, or a process that holds it up has ended or is stopped."""
        end, stopped = time.monotonic() + START_LIMIT, 0
        while not wait([source], LOOK_INTERVAL):
            if not (self.pid or self.is_starting() or wait([source], 0)):
                raise ForkServerFailed(ENDED)
            stopped_pid = self.find_stopped()
            stopped = stopped + 1 if stopped_pid else 0
            if stopped == STOPPED_LOOKS:
                is_own = stopped_pid in (self.pid, self.starter)
                waits = "is" if is_own else "waits for a process that is"
                raise ForkServerFailed(
                    f"{waits} stopped (SIGSTOP): kill -CONT {stopped_pid} lets it go on"
                )
            if time.monotonic() >= end:
                raise ForkServerFailed(NO_ANSWER)

    def await_answer(self, status: socket.socket) -> tuple[int, int]:
        """The process id that the server answers with, and the pidfd."""
        self.await_message(status)
        answer, pidfds, _ = receive_fds(status, MAX_ANSWER, 1)
        if not answer:
            raise ForkServerFailed(ENDED if wait([self.requests], END_LIMIT) else NO_ROOM)
        if (pid := MESSAGE.unpack_from(answer)[0]) == REFUSED:
            raise ForkServerFailed(answer[MESSAGE.size :].decode())
        self.ready = True
        return pid, pidfds[0]

    def is_stopped(self) -> bool:
        return not wait([self.pidfd], 0) and is_stopped(self.pid)

    def find_stopped(self) -> int | None:
        """The process that holds up its answer, if somebody has stopped one: its starter, itself
        or, during its imports, a program that one of these runs (torch's runs `ldconfig`)."""
        if not self.pid:
            return self.starter if self.is_starting() and is_stopped(self.starter) else None
        if self.is_stopped():
            return self.pid
        return next(filter(is_stopped, self.list_imported()), None)

    def list_imported(self) -> list[int]:
        """The process ids of the programs that its imports run. (Later its children are ranks.)"""
        return child_processes.list_children(self.pid) if self.pid and not self.ready else []

    def is_running(self) -> bool:
        """Whether it has not hung up. (It does so before the kernel has put its memory away, which
        takes a while.)"""
        if not self.pid and wait([self.requests], 0):
            try:
                self.meet()
            except ForkServerFailed:
                return False
        return not wait([self.requests], 0)

    def is_idle(self) -> bool:
        """Whether none of its processes is left."""
        return all(each.has_ended for each in self.processes)

    def end(self) -> None:
        """End it; what holds the other end of the lifeline (its ranks, if there are any) ends with
        it."""
        with self.requests:
            if not (self.ready and self.is_running() and self.ends_by_itself()):
                self.kill()
        self.close()
        if not self.pid:
            self.wait_for_starter()

    def kill(self) -> None:
        """Kill it, or its starter, and the programs that its imports run."""
        if not self.pid and self.is_starting():  # the server may be there, and be stopped
            started = child_processes.list_children(self.starter)
            child_processes.kill_all([*started, self.starter])
        child_processes.kill_all(self.list_imported())  # one that is stopped would stay so
        # it has ended, or is another user's by now: without its lifeline it ends as well
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pid:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it. Unless another process holds on to it, it ends with its ranks."""
        self.requests.close()
        os.close(self.lifeline)
        if self.pid:
            os.close(self.pidfd)

    def ends_by_itself(self) -> bool:
        """Whether it says that it does. It may have something to write then (coverage, for
        example)."""
        self.requests.shutdown(socket.SHUT_WR)
        return bool(wait([self.requests], END_LIMIT))


def preload(*modules: str) -> None:
    """Add to what the server imports. Counts until this process starts its first rank."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)


def import_with(settings: Mapping[str, str]) -> None:
    """Add to the environment that the server imports torch in. Counts until this process starts its
    first rank. (A rank's own environment is the caller's.)"""
    _settings.update(settings)


def warm_up() -> None:
    """Let the server begin with its imports, if it has not: this returns at once."""
    running_server()


def leave_if_imported() -> None:
    """End this process if it is a rank that is importing, unguarded, the very script that started
    it.

    It would start ranks that start ranks. The launcher recognises the exit code and explains, once.
    """
    if is_importing_program():
        os._exit(UNGUARDED)


def end_servers() -> None:
    """End the server now. (The system ends it when this process ends, however that happens.)"""
    with _lock:
        while _servers:
            _servers.pop().end()


# Once, and before anybody can register what asks ranks to leave: at the exit that comes first,
# being the later one.
atexit.register(end_servers)
os.register_at_fork(after_in_child=_servers.clear)


def new_server() -> ForkServerClient:
    """A fork server for one rank alone, which ends it by `end`."""
    return ForkServerClient(find_modules_as_here(), PRELOADED, _settings)


def running_server() -> ForkServerClient:
    """The fork server: a new one if there is none, none any more, or if this process has changed in
    what a new process has from it."""
    caller = read_caller()
    with _lock:
        for client in [*_servers]:
            if not client.is_running() or (client.caller != caller and client.is_idle()):
                _servers.remove(client)
                client.end()
        found = next((each for each in _servers if each.caller == caller), None)
        if found is None:
            found = new_server()
            _servers.append(found)
        return found


Caller = tuple[Inheritance, tuple[tuple[str, str], ...]]


def read_caller() -> Caller:
    """What a new process has from this one for as long as it lives."""
    return read_inheritance(), read_once(os.environ)
