"""A process that comes of the fork server, and the launcher's end of a line to it."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from playground.base.forks import close_in_children
from playground.base.upstream import pickle_main
from playground.world.launcher.fork_client import START_LIMIT, ForkServerClient, running_server
from playground.world.launcher.fork_starter import MESSAGE

CREDENTIALS = struct.Struct("iII")
"""Process, user and group."""
LOST_BY_THE_SERVER = 256
"""In the place of the exit code of a rank whose fork server is gone, or stopped: it is not known
how it ended."""


class ForkedProcess:
    """A new process that calls `main(*args)`, once the server has done its imports. What it prints
    goes into the pipes for stdout and stderr, if `streams` are given, from its import of the
    program on; a third stream is its stdin. It comes from `server`, if one is given, which ends
    with it if it `ends_server`. Raises `ForkServerFailed` if there can be no process.

    How it ended is heard from the server. Signals, and whether it has ended, need none: it may be
    stopped or dead.
    """

    def __init__(
        self,
        main: Callable[..., object],
        args: tuple[Any, ...] = (),
        streams: Sequence[Connection] = (),
        server: ForkServerClient | None = None,
        ends_server: bool = True,
        imports_program: bool = True,
    ) -> None:
        self.fds = [stream.fileno() for stream in streams]
        self.returncode: int | None = None
        work = pickle_main(main, args, self.fds, imports_program)
        self.server = server or running_server()
        self.own_server = server if ends_server else None
        self.pid, pidfd, self.sentinel, pipe = self.server.fork(self.fds, len(streams))
        self.server.processes.add(self)
        self.pidfd = Connection(pidfd, writable=False)
        self.status = Connection(self.sentinel, writable=False)
        close_in_children(self.pidfd, self.status)
        # It may have been killed already: its sentinel says so.
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as to_rank:
            to_rank.write(work)

    @property
    def has_ended(self) -> bool:
        return self.pidfd.closed or bool(wait([self.pidfd], 0))

    @property
    def exitcode(self) -> int | None:
        """None as long as it runs."""
        return self.join(0.0)

    def join(self, seconds: float = math.inf) -> int | None:
        """Wait for its end. The exit code; None if it still runs after `seconds`."""
        end = time.monotonic() + seconds
        while self.returncode is None:
            has_ended, left = bool(wait([self.pidfd], 0)), max(0.0, end - time.monotonic())
            if wait([self.status], 0):
                message = os.read(self.sentinel, MESSAGE.size)
                # the server is gone; the process may be stopped, or hold the GIL, and not notice
                if not message:
                    self.kill()
                    wait([self.pidfd])
                self.returncode = MESSAGE.unpack(message)[0] if message else LOST_BY_THE_SERVER
            elif has_ended and self.server.is_stopped():
                self.returncode = LOST_BY_THE_SERVER
            elif left == 0:
                break
            else:
                wait([self.status] if has_ended else [self.status, self.pidfd], min(left, 0.2))
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        # it has ended, and the server has waited for it
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd.fileno(), number)

    def close(self) -> None:
        self.pidfd.close()
        self.status.close()
        if self.own_server:
            self.own_server.end()


def start(
    main: Callable[..., None],
    *args: Any,
    streams: Sequence[Connection] = (),
    server: ForkServerClient | None = None,
    ends_server: bool = True,
    imports_program: bool = True,
) -> tuple[ForkedProcess, Connection]:
    """A new process that runs `main(line, *args)`, and our end of that line: see
    `ForkedProcess`."""
    ours, theirs = mp.Pipe()
    close_in_children(ours)
    with socket.socket(fileno=os.dup(ours.fileno())) as end:
        end.setblocking(True)  # otherwise `socket.setdefaulttimeout` counts here
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # for `find_sender`
        # A message that is not taken in (the process is stopped) raises BlockingIOError.
        end.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START_LIMIT), 0)
        )
    try:
        with theirs:
            process = ForkedProcess(
                main, (theirs, *args), streams, server, ends_server, imports_program
            )
            return process, ours
    except BaseException:
        # Ctrl-C too: the process may come to be all the same, and ends when it finds the line dead
        ours.close()
        if server and ends_server:
            server.end()
        raise


def find_sender(line: Connection) -> tuple[int, int]:
    """The process that the next message of a line is from, and its real user, as the kernel knows
    them: 0 and -1 where the line ends. Raises `OSError` where the rank is gone.

    Source: SCM_CREDENTIALS in https://man7.org/linux/man-pages/man7/unix.7.html
    """
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        _, given, *_ = end.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size), socket.MSG_PEEK)
    for level, kind, content in given:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, user, _ = CREDENTIALS.unpack(content)
            return pid, user
    return 0, -1
