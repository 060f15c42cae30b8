"""This process's TCP connections: listed, ended, and kept from other users of this machine in a
world that we have launched, as loopback is open to all of them.

Neither torch's store nor gloo asks who connects. But no rank has to connect to gloo any more once a
process group is formed: from then on, until the next is being formed, the kernel drops whatever
arrives where gloo listens, and it says whose the connections are that were there before. To the
store, processes of the ranks may connect later too: what they send reaches it once the kernel has
said whose they are. (Linux only.) The ranks of nccl connect later too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import itertools
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playground.base.forks import is_inheritable_epoll

ACCEPT_LIMIT = 5.0
"""Seconds in which whatever has connected must be accepted: the thread that does so has little else
to do."""
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
Filter = tuple[tuple[int, int, int, int], ...]
"""Instructions: operation, jumps, operand. Source: Documentation/networking/filter.rst"""
NOTHING: Filter = ((0x06, 0, 0, 0),)
"""Keep 0 bytes of every packet."""
NO_DATA: Filter = (
    # X: bytes of TCP's header; keep what has no more
    (0x30, 0, 0, 12), (0x54, 0, 0, 0xF0), (0x74, 0, 0, 2), (0x07, 0, 0, 0),
    (0x80, 0, 0, 0), (0x1D, 0, 1, 0), (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0),
)  # fmt: skip
"""Keep what makes a connection and ends it. Those that are accepted there have this filter too,
until it is taken off: then the other end sends what was dropped again."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
OWNER = struct.Struct("80xII")
"""User and inode in the kernel's answer. Source: struct inet_diag_msg, sock_diag(7)"""
CONNECT_LIMIT = 0.2
"""Seconds in which a socket of this process takes a connection, if it does at all."""
BETWEEN_LOOKS = 0.1
"""Seconds between two looks for connections to the store. The other end sends what was dropped
again after 0.2 s, then after 0.4 s more, and so on. (epoll does not tell of a connection that
another thread has accepted meanwhile.)"""


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


class StrangerConnected(Exception):
    """A process of another user has connected to this one."""


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


def let_ranks_connect() -> None:
    """Take connections where gloo listens: a group that is split from another uses the sockets of
    that one."""
    for each in gloo_sockets():
        remove_filter(each)


def shut_out_strangers(store_port: int = 0) -> None:
    """Take no connection any more where gloo listens, and no data where the store does, if a port
    is given and the store is served here. Make sure whose the connections are that are there.

    Raises `StrangerConnected` if one is another user's, or is not accepted.
    """
    # some systems (gVisor) offer only part of it
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        doors = [
            opened.enter_context(duplicate(each.fileno()))
            for each in gloo_sockets()
            if is_listening(each)
        ]
        for door in doors:
            put_filter(door, NOTHING)
        for each in store_sockets(store_port):
            if is_listening(each):
                put_filter(each, NO_DATA)
                doors.append(opened.enter_context(duplicate(each.fileno())))
        await_accepted(doors)
        kernel = opened.enter_context(open_kernel())
        ports = {port_of(door.getsockname()) for door in doors}
        for each in itertools.chain(gloo_sockets(), store_sockets(store_port)):
            # it listens, is broken by now, or this kernel does not say
            with contextlib.suppress(OSError):
                here, there = each.getsockname(), each.getpeername()
                # Of a connection that this process has asked for, the other end may not be accepted
                # yet.
                owner = ask_owner(kernel, there, here if port_of(here) in ports else None)
                if owner != os.geteuid() and not has_filter(each):
                    host, port, *_ = there
                    raise StrangerConnected(
                        f"{host}:{port} is a process of another user (id {owner})"
                    )


def admit_to_store(port: int, is_closed: Callable[[], bool]) -> None:
    """The body of a thread: of what has connected to the store since strangers were shut out, let
    what this user's processes send come through, and hang up on others. Until the store is
    closed."""
    with contextlib.suppress(OSError), open_kernel() as kernel:  # as above
        while not is_closed():
            for each in store_sockets(port):
                if has_filter(each) and not is_listening(each):
                    admit(each, kernel)
            time.sleep(BETWEEN_LOOKS)


def admit(connection: socket.socket, kernel: socket.socket) -> None:
    """Let what this user sends come through. To hang up on others."""
    with contextlib.suppress(OSError):  # the other end has hung up
        if ask_owner(kernel, connection.getpeername(), connection.getsockname()) == os.geteuid():
            return remove_filter(connection)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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


def put_filter(each: socket.socket, instructions: Filter) -> None:
    """Have the kernel drop what arrives there, or part of it. (To close a socket where gloo listens
    would be an error to the thread that polls it.)"""
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *one) for one in instructions)
    )
    described = struct.pack("HP", len(instructions), ctypes.addressof(program))
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def has_filter(each: socket.socket) -> bool:
    """Whether it has one. (The kernel takes the size for a number of instructions, of 8 bytes
    each.)"""
    return bool(each.getsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, 8 * len(NO_DATA)))


def remove_filter(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has none
        each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def await_accepted(doors: list[socket.socket]) -> None:
    """Wait until all that have connected are accepted: before, this process does not have their
    connections."""
    end = time.monotonic() + ACCEPT_LIMIT
    # Of a socket that listens, tcpi_unacked counts those that have connected and are not accepted
    # yet.
    while any(
        door.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:] != bytes(4) for door in doors
    ):
        if time.monotonic() > end:
            raise StrangerConnected(f"what has connected is not accepted within {ACCEPT_LIMIT:g} s")
        time.sleep(0.001)


def open_kernel() -> socket.socket:
    """A connection to the kernel that knows whose sockets are."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)


def ask_owner(kernel: socket.socket, address: tuple[str, int], peer: tuple[str, int] | None) -> int:
    """The id of the user whose socket has this address and is connected to `peer`; None: and
    listens.

    Raises `OSError` if there is none, or if the kernel does not say.
    """
    anyone = "::" if ":" in address[0] else "0.0.0.0"
    version, host, port = pack_address(address)
    _, peer_host, peer_port = pack_address(peer or (anyone, 0))
    identity = struct.pack("!HH16s16s12s", port, peer_port, host, peer_host, bytes(4) + b"\xff" * 8)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    request = struct.pack("BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + identity
    kernel.send(
        struct.pack("IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + request
    )
    answer = kernel.recv(4096)
    if struct.unpack_from("H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY:
        raise OSError(-struct.unpack_from("i", answer, 16)[0], "the kernel knows of no such socket")
    owner, inode = OWNER.unpack_from(answer)
    if not inode:
        raise OSError(errno.ENOENT, "the socket is closed, and belongs to nobody")
    return int(owner)


def port_of(address: tuple[Any, ...]) -> int:
    """The port of an address of IPv4 or of IPv6."""
    _, port, *_ = address
    return int(port)


def read_ports(connection: socket.socket) -> tuple[int, int]:
    """The ports of its two ends. Raises `OSError` if it is not connected."""
    return port_of(connection.getsockname()), port_of(connection.getpeername())


def pack_address(address: tuple[str, int]) -> tuple[int, bytes, int]:
    """(4 or 6, the IP address padded to 16 bytes, the port): of an IPv4 address in IPv6 form, what
    is mapped."""
    host = ipaddress.ip_address(address[0])
    host = getattr(host, "ipv4_mapped", None) or host
    return host.version, host.packed, address[1]
