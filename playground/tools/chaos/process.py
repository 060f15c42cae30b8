"""A command of ours as a process of its own, heard line by line."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from playground.runtime.process_end import end_with_parent

END_LIMIT = 5.0
"""Seconds a command has to end that is told to."""


class CommandProcess:
    """`python -m playground words…`, in a session of its own: Ctrl-C reaches its parent alone. If that is killed, so is
    this. What it prints on stdout is thrown away."""

    def __init__(self, words: tuple[str, ...], folder: Path, restarts: int) -> None:
        options = ("--snapshots", str(folder), "--restarts", str(restarts))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "playground", *words, *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL, ctypes.CDLL(None)),
        )  # fmt: skip
        assert self.process.stderr
        self.stderr = self.process.stderr
        os.set_blocking(self.stderr.fileno(), False)
        self.unfinished = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def read_lines(self, seconds: float) -> list[str]:
        """What it has printed on stderr, in whole lines; wait so long at most for any."""
        until = time.monotonic() + seconds
        block = b""
        if select.select([self.stderr], [], [], seconds)[0]:
            block = self.stderr.read() or b""
            if not block:  # the end of the file, and soon of the process
                time.sleep(max(0.0, until - time.monotonic()))
        *lines, self.unfinished = (self.unfinished + block).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def end(self) -> None:
        """End it, if it runs, and with it its ranks."""
        if self.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.stderr.close()
