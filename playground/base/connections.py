"""This process's TCP connections: listed, and ended. (Linux only.)"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playground.base.forks import is_inheritable_epoll
from playground.base.socket_filter import has_filter

CONNECT_LIMIT = 0.2
"""Seconds in which a socket of this process takes a connection, if it does at all."""


def tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process. It is closed when the next one is asked
    for."""
    by_inode = {}  # one of the descriptors of each
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                by_inode[status.st_ino] = int(name)
    for descriptor in by_inode.values():
        with contextlib.suppress(OSError), duplicate(descriptor) as each:  # or closed by now
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield each


def tcp_connections() -> Iterator[socket.socket]:
    """As `tcp_sockets`: those that are connected."""
    for each in tcp_sockets():
        with contextlib.suppress(OSError):  # it listens
            each.getpeername()
            yield each


def shut_down_connections(spare_port: int) -> None:
    """End every TCP connection of this process but those to or from `spare_port`: whoever waits
    there gets an error.

    It is the abort that gloo lacks (pytorch/pytorch#130345): a thread that sits in gloo comes out
    of it.
    """
    for connection in tcp_connections():
        with contextlib.suppress(OSError):
            if spare_port not in read_ports(connection):
                connection.shutdown(socket.SHUT_RDWR)


def shut_down_groups(store_port: int) -> None:
    """End the connections of gloo and of the store at this port: whoever waits in a process group,
    or for one to be formed, gets an error. What listens is left alone, or gloo ends the process."""
    at_store = (each for each in tcp_connections() if store_port in ports_of(each))
    for each in itertools.chain(gloo_sockets(), at_store):
        with contextlib.suppress(OSError):  # it is none that is connected
            if not is_listening(each):
                each.shutdown(socket.SHUT_RDWR)


def break_off_connecting(size: int) -> None:
    """Where gloo is forming a group of this many ranks at most, end the wait for those that do not
    connect: connect in their place, and hang up.

    Whoever connects sends the number of a pair, and the pairs of a group are counted from 0 on.
    Source: gloo/transport/tcp/listener.cc
    """
    doors = [each.getsockname() for each in gloo_sockets() if waits_for_ranks(each)]
    for door, number in itertools.product(doors, range(size)):
        with (
            contextlib.suppress(OSError),  # nobody is waited for any more
            socket.create_connection(door[:2], CONNECT_LIMIT) as connection,
        ):
            connection.sendall(struct.pack("=q", number))


def waits_for_ranks(each: socket.socket) -> bool:
    """Whether it takes connections now."""
    return is_listening(each) and not has_filter(each)


def ports_of(connection: socket.socket) -> tuple[int, int]:
    """The ports of its two ends; 0 where it has been closed."""
    with contextlib.suppress(OSError):
        return read_ports(connection)
    return 0, 0


def gloo_sockets() -> Iterator[socket.socket]:
    """As `tcp_sockets`: those of gloo. Its threads wait with an epoll instance that gloo leaves
    inheritable. Python, libuv and others do not leave theirs inheritable."""
    watched = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            if is_inheritable_epoll(int(name)):
                text = Path(f"/proc/self/fdinfo/{name}").read_text()
                watched.update(re.findall(r" ino:(\w+)", text))
    return (each for each in tcp_sockets() if f"{os.fstat(each.fileno()).st_ino:x}" in watched)


def store_sockets(port: int) -> Iterator[socket.socket]:
    """As `tcp_sockets`: those of a store that this process serves at this port."""
    return (each for each in tcp_sockets() if port_of(each.getsockname()) == port)


def duplicate(descriptor: int) -> socket.socket:
    """A duplicate of a socket. Whether that blocks, which both share, stays as it is: the thread of
    gloo that accepts connections hangs in `accept` otherwise, and with it split_group.
    (`socket.dup` sets it, and so does `socket.setdefaulttimeout`.)"""
    blocking = os.get_blocking(descriptor)
    made = socket.socket(fileno=os.dup(descriptor))
    if os.get_blocking(descriptor) != blocking:
        os.set_blocking(descriptor, blocking)
    return made


def is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def port_of(address: tuple[Any, ...]) -> int:
    """The port of an address of IPv4 or of IPv6."""
    _, port, *_ = address
    return int(port)


def read_ports(connection: socket.socket) -> tuple[int, int]:
    """The ports of its two ends. Raises `OSError` if it is not connected."""
    return port_of(connection.getsockname()), port_of(connection.getpeername())
