"""This process's TCP connections: what is found out through them, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def tcp_connections() -> Iterator[socket.socket]:
    """A duplicate of each connected TCP socket of this process, closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                        duplicate.getpeername()  # of one that listens, an error
                        yield duplicate


def shut_down_connections(spare_port: int) -> None:
    """End every TCP connection of this process but those to or from `spare_port`: whoever waits there gets an error.

    It is the abort that gloo lacks (pytorch/pytorch#130345): a thread that sits in gloo comes out of it.
    """
    for connection in tcp_connections():
        with contextlib.suppress(OSError):
            if spare_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                connection.shutdown(socket.SHUT_RDWR)
