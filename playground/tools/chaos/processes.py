"""The processes of a command that starts ranks, as Linux shows them in /proc: whose child each is, what it has open.

launcher            the command itself
└── fork server     its child; what that was started with names the module
    ├── rank 0      the fork server's children are ranks, and nothing else is
    └── rank 1
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.meeting.process_end import end_with_parent
from playground.runtime.remote import remote
from playground.tools.chaos.results import FORK_SERVER, LAUNCHER, RANK

PROC = Path("/proc")
SERVE = remote("playground.runtime.launcher.fork_server:serve")
ENDED = ("Z", "X")
"""States of a process that has ended and was not waited for."""


@dataclass(frozen=True)
class Processes:
    """Ids of the processes of one command that are alive."""

    launcher: int
    server: int | None
    ranks: tuple[int, ...]

    def of_role(self, role: str) -> list[int]:
        servers = [] if self.server is None else [self.server]
        return {LAUNCHER: [self.launcher], FORK_SERVER: servers, RANK: [*self.ranks]}[role]


def require_proc() -> None:
    """Raise `UsageError` where the system does not show whose child a process is, or cannot signal one for certain."""
    if not children_file(os.getpid()).is_file():
        raise UsageError("chaos finds ranks by /proc/PID/task/PID/children, which this system has not: run it on Linux")
    if not hasattr(os, "pidfd_open"):
        raise UsageError("chaos kills ranks by pidfd, which this system has not: run it on Linux 5.3 or newer")


def find_processes(launcher: int) -> Processes:
    """The processes of the command that runs as this process, as far as they are alive."""
    server = next((pid for pid in children_of(launcher) if is_fork_server(pid)), None)
    return Processes(launcher, server, () if server is None else tuple(children_of(server)))


def open_process(pid: int, role: str, launcher: int) -> int | None:
    """A pidfd of this process; None unless it has that role in the command. The process is looked at when it cannot be
    taken for another any more: the number of one that has ended may be that of a stranger by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if is_alive(pid) and pid in find_processes(launcher).of_role(role):
        return pidfd
    os.close(pidfd)
    return None


def children_file(pid: int) -> Path:
    return PROC / str(pid) / "task" / str(pid) / "children"


def children_of(pid: int) -> list[int]:
    """The children of this process's main thread that are alive; none, if it has ended itself."""
    try:
        children = children_file(pid).read_text().split()
    except OSError:
        return []
    return [child for child in map(int, children) if is_alive(child)]


def is_alive(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ENDED
    except OSError:
        return False


def is_fork_server(pid: int) -> bool:
    try:
        return SERVE.module.encode() in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def opened_in(folder: Path, pid: int) -> list[int]:
    """How the process has each of the files and folders in `folder` open: `os.O_RDONLY`, `os.O_WRONLY`, `os.O_RDWR`, or
    `os.O_DIRECTORY` for a folder."""
    found = []
    whole = folder.resolve()
    descriptors = PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):  # the process has ended
        for descriptor in os.listdir(descriptors):
            with contextlib.suppress(OSError):  # the file has been closed
                if Path(os.readlink(descriptors / descriptor)).is_relative_to(whole):
                    flags = flags_of(pid, descriptor)
                    found.append(flags & os.O_DIRECTORY or flags & os.O_ACCMODE)
    return found


def flags_of(pid: int, descriptor: str) -> int:
    """The flags a file was opened with. Source: https://man7.org/linux/man-pages/man5/proc_pid_fdinfo.5.html"""
    lines = (PROC / str(pid) / "fdinfo" / descriptor).read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


END_LIMIT = 5.0
"""Seconds a command has to end that is told to."""


class CommandProcess(subprocess.Popen[bytes]):
    """`python -m playground words…`, in a session of its own: Ctrl-C reaches its parent alone. If that is killed, so is
    this. Its stdout is discarded."""

    def __init__(self, words: tuple[str, ...], folder: Path, restarts: int) -> None:
        options = ("--snapshots", str(folder), "--restarts", str(restarts))
        super().__init__(
            [sys.executable, "-m", "playground", *words, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL, ctypes.CDLL(None)),
        )
        assert self.stderr
        self.errors = self.stderr
        os.set_blocking(self.errors.fileno(), False)
        self.unfinished = b""

    def read_lines(self, seconds: float) -> list[str]:
        """Lines it has printed on stderr, whole ones; wait at most `seconds` for any."""
        until = time.monotonic() + seconds
        block = b""
        if select.select([self.errors], [], [], seconds)[0]:
            block = self.errors.read() or b""
            if not block:  # the end of the file, and soon of the process
                time.sleep(max(0.0, until - time.monotonic()))
        *lines, self.unfinished = (self.unfinished + block).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def end(self) -> None:
        """End it, if it runs, and with it its ranks."""
        if self.poll() is None:
            self.terminate()
            try:
                self.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()
        self.errors.close()
