"""The fork server's side: a process that imports torch once, and forks itself for each rank.

`fork_client` starts it by `fork_starter` and holds the other ends: of a socket, over which a byte
asks for a rank, and of a pipe that carries nothing and whose end means that the launcher is gone.
The byte says how many of the others are the rank's stdout, stderr and, if it reads one, stdin, and
with it come file descriptors:

| descriptor | use                                                                                 |
|------------|-------------------------------------------------------------------------------------|
| status     | a socket, for messages: the rank's process id and a pidfd of it, then its exit      |
|            | code; or `REFUSED` and the reason                                                   |
| work       | what the rank is to run, pickled                                                    |
| the others | what the rank is to inherit: its line to the launcher, for example                  |

The standard library has a fork server, too. It listens on a socket in the temporary directory
(which can be full, missing, or have too long a name, and which a killed process leaves behind),
brings a second process along, and learns of its launcher's death only when its imports are done.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import warnings
from multiprocessing.connection import wait
from typing import NoReturn

from playground.base.forks import move_up, receive_fds
from playground.base.imports import environment
from playground.base.process_checks import open_standard_streams
from playground.base.upstream import (
    detach_finalizers,
    forget_parent,
    run_exit_functions,
    run_pickled,
)
from playground.world.launcher.fork_starter import MESSAGE
from playground.world.rank.process import (
    FROM_TERMINAL,
    begin,
    end,
    has_children,
    kill_at_end_of_file,
    lead_session,
)

REFUSED = -1
"""In the place of a process id: there will be no rank. The reason follows, as text."""
NO_ROOM = "has no file descriptor left: raise the limit (ulimit -n)"
MAX_FDS = 64
"""That come with a request."""
LAUNCHER_ONLY = {signal.SIGTERM, *FROM_TERMINAL}
"""A terminal or a job manager sends them to every process of a group: the launcher alone hears
them, and decides. The server is started with them blocked. A rank takes SIGTERM when it knows what
to do with it (`leave_to_launcher`)."""
END_GRACE = 0.3
"""Seconds that processes have to end which a rank has started, and which got SIGTERM as it was
ended."""
PR_SET_CHILD_SUBREAPER = 36
"""Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html"""
STREAMS = (1, 2, 0)
"""Numbers of the standard streams, in the order in which a rank is given its own."""


def serve(lifeline: int, modules: list[str], settings: dict[str, str]) -> NoReturn:
    """Import `modules` with these environment variables, too. Then fork a rank for each request
    that arrives at standard input, until that ends."""
    kill_at_end_of_file(lifeline, os.getpid())
    open_standard_streams()
    requests = socket.socket(fileno=os.dup(0))
    os.environ.update(settings)
    environment.update(settings)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    failure = import_all(modules)
    detach_finalizers()  # of what is imported: here once, and not in each rank
    # A garbage collection in a rank would write to the header of every object it inherited, and so
    # copy the pages that all ranks share. Source:
    # https://docs.python.org/3/library/gc.html#gc.freeze
    gc.collect()
    gc.freeze()
    with requests:
        ForkServer(requests, lifeline, failure).run()
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY)  # it need not be killed
    run_exit_functions()
    os._exit(0)  # the rest of an orderly exit would only give memory back


def import_all(modules: list[str]) -> str:
    """Import `modules`; the reason if torch itself cannot be imported. (The rank that needs another
    one says so.)"""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if "torch" not in sys.modules or isinstance(error, MemoryError):
                why = " ".join(f"{type(error).__name__}: {error}".split())
                return (
                    f"cannot import {name} ({why}): is torch installed, is there memory (ulimit "
                    "-v)?"
                )
    return ""


def arrives(pipe: int) -> bool:
    """Wait for something to read; False if there will be nothing: the launcher has given up
    meanwhile (Ctrl-C)."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll()[0][1] & select.POLLIN)


class ForkServer:
    """Forks the ranks and waits for their ends."""

    def __init__(self, requests: socket.socket, lifeline: int, failure: str) -> None:
        self.requests = requests
        self.lifeline = lifeline
        self.failure = failure
        self.statuses: dict[int, socket.socket] = {}
        """Sockets for the exit codes of running ranks, by process id."""
        self.ending: dict[int, float] = {}
        """Groups of ranks that have failed or were ended: when what is left of them is to be
        killed."""
        self.wakeups, self.wakeup = os.pipe()
        os.set_blocking(self.wakeups, False)
        os.set_blocking(self.wakeup, False)

    def run(self) -> None:
        # only a handler makes it write to the wake-up pipe
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
        # What a rank has started is a child of this process when the rank is gone, and can be
        # waited for.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        has_more = True
        while has_more or self.ending:
            sources: list[int | socket.socket] = [self.wakeups]
            if has_more:
                sources.append(self.requests)
            ready = wait(sources, END_GRACE if self.ending else None)
            if self.wakeups in ready:
                os.read(self.wakeups, 4096)
                self.reap()
            self.end_groups()
            if self.requests in ready:
                has_more = self.answer()

    def answer(self) -> bool:
        """Take one request and fork; False if there will be no more."""
        request, fds, flags = receive_fds(self.requests, 1, MAX_FDS)
        if not request:
            return False
        with contextlib.ExitStack() as received:
            for descriptor in fds[1:]:
                received.callback(os.close, descriptor)
            if fds:
                status = received.enter_context(socket.socket(fileno=fds[0]))
                complete = len(fds) > 1 and not flags & socket.MSG_CTRUNC
                self.fork(status, fds[1:], request[0], self.failure if complete else NO_ROOM)
        return True

    def fork(self, status: socket.socket, fds: list[int], streams: int, failure: str) -> None:
        """Fork a rank, unless there is a `failure` already, and answer the request."""
        pid, pidfds = REFUSED, list[int]()
        if not failure:
            try:
                # of threads: those of numpy's BLAS, which is prepared for a fork
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
            except OSError as error:
                failure = (
                    f"cannot start another process ({error.strerror}): raise the limit (ulimit -u)"
                )
        if pid == 0:
            # or the launcher would wait for what only a server that has been killed could write
            status.close()
            self.become_rank(streams, *fds)
        if pid > 0:
            pidfds = [os.pidfd_open(pid)]
        with contextlib.suppress(ConnectionError):  # the launcher has given up meanwhile
            socket.send_fds(status, [MESSAGE.pack(pid) + failure.encode()], pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
            self.statuses[pid] = socket.socket(fileno=status.detach())

    def become_rank(self, streams: int, work: int, *fds: int) -> NoReturn:
        """In the new process: drop what is the server's, and run what `work` says. The first `fds`
        are its `streams`: stdout, stderr and, perhaps, stdin."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.requests.close()
            for descriptor in (self.wakeups, self.wakeup):
                os.close(descriptor)
            for status in self.statuses.values():
                status.close()
            begin(self.lifeline)
            forget_parent()
            for number, descriptor in zip(STREAMS, fds[:streams], strict=False):
                os.dup2(descriptor, number)
                os.close(descriptor)
            kept = [*fds[:streams], *map(move_up, fds[streams:])]
            if streams == len(STREAMS) and os.isatty(0):
                lead_session()
            if not arrives(work):
                os._exit(1)
            run_pickled(work, kept)
        except BaseException as error:
            end(error)
        end()

    def reap(self) -> None:
        """Pass on the exit codes of the ranks that have ended."""
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended[0], os.waitstatus_to_exitcode(ended[1])
                # otherwise it is a child of a module that was imported, or of a rank
                if pid in self.statuses:
                    with self.statuses.pop(pid) as status, contextlib.suppress(ConnectionError):
                        status.send(MESSAGE.pack(code))
                    if code and has_children(os.P_PGID, pid):
                        os.killpg(pid, signal.SIGTERM)
                        self.ending[pid] = time.monotonic() + END_GRACE

    def end_groups(self) -> None:
        """Kill what has not ended in time of the groups of ranks."""
        for group, deadline in [*self.ending.items()]:
            if not has_children(os.P_PGID, group):
                del self.ending[group]
            elif time.monotonic() >= deadline:
                os.killpg(group, signal.SIGKILL)
