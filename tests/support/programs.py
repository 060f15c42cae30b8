"""Programs in processes that the session's fork server forks: each finds torch imported, as its own
fork server does, and costs a tenth of a start.

For tests of what a program does once it runs. A test of its start takes a process of its own
(`start_cli`).
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import os
import pty
import runpy
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, TextIO

from playground.world.launcher import child_processes, examiner, forked_process
from playground.world.launcher.fork_server import LAUNCHER_ONLY

examiner.INTERVAL = 0.05
"""Seconds between two looks of the launchers of all tests, in these programs too, in place of a
quarter of a second: what stands still is proved to sooner, and what is wrongly proved is seen in
less time."""
SCRIPT = "script"
"""Module of a program that a test writes itself."""
STARTS_RANKS = {"playground", "ipykernel_launcher", SCRIPT}
"""Modules of programs that start ranks, unless they are one."""


@dataclass
class Outcome:
    """The exit code of a program, and what it printed on stdout and stderr."""

    code: int | None
    out: str
    err: str


class ForkedProgram:
    """`python -m module words…` with this environment, leading a session of its own. Used as a
    `subprocess.Popen` is; its streams are pipes and are read in full: what it prints on stderr must
    fit into one."""

    def __init__(self, module: str, words: list[str], environ: dict[str, str]) -> None:
        self.stdout, stdout = open_pipe()
        self.stderr, stderr = open_pipe()
        with stdout, stderr:
            self.process, self.line = forked_process.start(
                run_module, module, words, environ, {1: stdout, 2: stderr}
            )
        assert self.process.pid
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code; None if it goes on after so many seconds."""
        self.process.join(timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed on stdout and on stderr, after its end: by SIGKILL, if it goes on after
        so many seconds."""
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            return self.stdout.read(), self.stderr.read()
        finally:
            self.process.join()
            timer.cancel()

    def close(self) -> None:
        """End it, if it has not ended, and close its pipes."""
        self.process.kill()
        self.process.join()
        for stream in (self.stdout, self.stderr, self.line):
            stream.close()


def fork_in_terminal(
    module: str,
    words: list[str],
    environ: dict[str, str],
    height: int,
    width: int,
    is_new: bool = False,
) -> tuple[int, forked_process.ForkedProcess]:
    """`python -m module words…` in a pseudo-terminal of this size, which is its session's: the
    descriptor of the terminal's other end, and the process. `is_new`: torch is not imported there,
    nor anything else."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    with Connection(theirs) as terminal:
        streams = dict.fromkeys(range(3), terminal)
        process, line = forked_process.start(run_module, module, words, environ, streams, is_new)
    line.close()
    return ours, process


def open_pipe() -> tuple[TextIO, Connection]:
    """The end to read from, and the end for the process."""
    ours, theirs = Pipe(duplex=False)
    with ours:
        return open(os.dup(ours.fileno()), encoding="utf-8"), theirs


def open_to_write(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", closefd=False)


def open_unbuffered(number: int) -> TextIO:
    file = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(file, encoding="utf-8", write_through=True)


def run_module(
    line: Connection,
    module: str,
    words: list[str],
    environ: dict[str, str],
    streams: Mapping[int, Connection],
    is_new: bool = False,
) -> None:
    """In the new process: be to `module` what a process that has just been started is; `is_new`: be
    one. A stream for stdin is its terminal."""
    os.setpgid(0, os.getpgid(os.getppid()))  # it leads a group, and could not lead a session
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # it was the session's
    for number, stream in streams.items():
        os.dup2(stream.fileno(), number)
    for stream in {*streams.values()}:
        stream.close()
    if 0 in streams:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if is_new:
        os.execve(sys.executable, [sys.executable, "-m", module, *words], environ)
    sys.stdout, sys.stderr = map(open_to_write, (1, 2))
    sys.argv = [module, *words]
    if module in STARTS_RANKS and "RANK" not in environ:
        child_processes.spawn = fork_server(line)  # type: ignore[assignment]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    if module == SCRIPT:
        atexit._run_exitfuncs()  # other programs exit by themselves


def fork_server(line: Connection) -> Callable[[list[str], int, int], int]:
    """What does once, in the place of `child_processes.spawn`, what that does: the process that
    becomes this program's fork server is forked now, before the program has changed anything, and
    has torch imported."""
    spawn, (ours, theirs) = child_processes.spawn, socket.socketpair()
    if not (pid := os.fork()):
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_ONLY)
        # or it would be ended with this program by the server that has forked that
        os.setpgid(0, 0)
        for inherited in (line, ours):
            inherited.close()
        serve_when_asked(theirs)
    theirs.close()

    def tell_it(words: list[str], stdin: int, kept: int) -> int:
        child_processes.spawn = spawn
        with ours:
            socket.send_fds(
                ours, [json.dumps([words[-1], kept, dict(os.environ)]).encode()], [stdin, kept]
            )
        return pid

    return tell_it


def serve_when_asked(asked: socket.socket) -> NoReturn:
    """Run the code of a fork server's command line, with its descriptors, if it arrives before the
    program ends."""
    try:
        with asked:
            message, descriptors, *_ = socket.recv_fds(asked, 2**20, 2)
        if message:
            code, kept, environ = json.loads(message)
            os.environ.clear()
            os.environ.update(environ)
            sys.stdout, sys.stderr = map(open_unbuffered, (1, 2))  # it is run with -u
            for descriptor, number in zip(descriptors, (0, kept), strict=True):
                if descriptor != number:
                    os.dup2(descriptor, number, inheritable=number == 0)
                    os.close(descriptor)
            exec(code, {})
    finally:
        os._exit(0)
