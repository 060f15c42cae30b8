"""Terminals for what is under test: pseudo-terminals of a given width."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """A pseudo-terminal: `stream` writes to it, and `shown` is what it has shown, once `stream` is
    closed."""

    def __init__(self, width: int = 80) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.stream: io.TextIOWrapper = open(theirs, "w", encoding="utf-8")  # noqa: SIM115 (closed by the user)
        self.arrived = b""
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        with contextlib.suppress(OSError):  # how Linux says that nobody writes any more
            while some := os.read(self.ours, 2**16):
                self.arrived += some

    @property
    def shown(self) -> str:
        self.stream.close()
        self.reader.join()
        return self.arrived.decode().replace("\r\n", "\n")


@contextlib.contextmanager
def open_terminal(width: int = 80) -> Iterator[Terminal]:
    terminal = Terminal(width)
    try:
        yield terminal
    finally:
        terminal.stream.close()
        terminal.reader.join()
        os.close(terminal.ours)
