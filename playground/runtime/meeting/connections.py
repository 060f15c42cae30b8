"""This process's TCP connections: what is found out through them, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Container, Iterator


def open_sockets() -> dict[int, int]:
    """By inode, which tells it from any other, the descriptor of each socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def tcp_sockets(known: Container[int] = ()) -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process, except those whose inodes are `known`. It is closed when the next
    one is asked for."""
    for inode, descriptor in open_sockets().items():
        with contextlib.suppress(OSError):  # closed by now
            if inode not in known:
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                        yield duplicate


def tcp_connections() -> Iterator[socket.socket]:
    """As `tcp_sockets`: those that are connected."""
    for each in tcp_sockets():
        with contextlib.suppress(OSError):  # it listens
            each.getpeername()
            yield each


def shut_down_connections(spare_port: int) -> None:
    """End every TCP connection of this process but those to or from `spare_port`: whoever waits there gets an error.

    It is the abort that gloo lacks (pytorch/pytorch#130345): a thread that sits in gloo comes out of it.
    """
    for connection in tcp_connections():
        with contextlib.suppress(OSError):
            if spare_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                connection.shutdown(socket.SHUT_RDWR)
