"""This process's TCP connections: listed, ended, and kept from other users of this machine in a world that we have
launched, as loopback is open to all of them.

Neither torch's store nor gloo asks who connects. But no rank has to connect any more once a process group of gloo is
formed: from then on the kernel drops whatever arrives where a rank listens, and it says whose the connections are that
were there before. (Linux only.) The ranks of nccl connect, and its threads come to the store, later too.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Container, Iterator

ACCEPT_LIMIT = 5.0
"""Seconds in which whatever has connected must be accepted: the thread that does so has little else to do."""
SO_ATTACH_FILTER = 26
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A program of one instruction: of every packet, keep 0 bytes. Source: Documentation/networking/filter.rst"""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
UID_OFFSET = 80
"""Bytes from the beginning of the kernel's answer. Source: struct inet_diag_msg, sock_diag(7)"""


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


class StrangerConnected(Exception):
    """A process of another user has connected to this one."""


def shut_out_strangers(known: set[int]) -> None:
    """Take no connection any more at this process's listening sockets, and make sure whose those are that it has.

    Sockets whose inodes are `known` are left alone. Raises `StrangerConnected` if a connection is another user's, or is
    not accepted.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:  # some systems (gVisor) offer only part of it
        doors = []
        for each in tcp_sockets(known):
            if is_listening(each):
                close_door(each)
                doors.append(opened.enter_context(each.dup()))
        await_accepted(doors)
        kernel = opened.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG))
        ports = {door.getsockname()[1] for door in doors}
        for each in tcp_sockets(known):
            with contextlib.suppress(OSError):  # broken by now, or this kernel does not say
                here, there = each.getsockname(), each.getpeername()
                # Of a connection that this process has asked for, the other end may not be accepted yet.
                owner = ask_owner(kernel, there, here if here[1] in ports else None)
                if owner != os.geteuid():
                    raise StrangerConnected(f"{there[0]}:{there[1]} is a process of another user (id {owner})")


def is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def close_door(listener: socket.socket) -> None:
    """Have the kernel drop what arrives there. (To close the socket would be an error to the thread that polls it.)"""
    program = struct.pack("HP", 1, ctypes.addressof(DROP_ALL))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def await_accepted(doors: list[socket.socket]) -> None:
    """Wait until all that have connected are accepted: before, this process does not have their connections."""
    end = time.monotonic() + ACCEPT_LIMIT
    # Of a socket that listens, tcpi_unacked counts those that have connected and are not accepted yet.
    while any(door.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:] != bytes(4) for door in doors):
        if time.monotonic() > end:
            raise StrangerConnected(f"what has connected is not accepted within {ACCEPT_LIMIT:g} s")
        time.sleep(0.001)


def ask_owner(kernel: socket.socket, address: tuple[str, int], peer: tuple[str, int] | None) -> int:
    """The id of the user whose socket has this address and is connected to `peer`; None: and listens.

    Raises `OSError` if there is none, or if the kernel does not say.
    """
    ends = [pack_address(address), pack_address(peer or ("0.0.0.0" if ":" not in address[0] else "::", 0))]
    (version, host, port), (_, peer_host, peer_port) = ends
    identity = struct.pack("!HH16s16s12s", port, peer_port, host, peer_host, bytes(4) + b"\xff" * 8)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    request = struct.pack("BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + identity
    kernel.send(struct.pack("IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + request)
    answer = kernel.recv(4096)
    if struct.unpack_from("H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY:
        raise OSError(-struct.unpack_from("i", answer, 16)[0], "the kernel knows of no such socket")
    return int(struct.unpack_from("I", answer, UID_OFFSET)[0])


def pack_address(address: tuple[str, int]) -> tuple[int, bytes, int]:
    """(4 or 6, the IP address padded to 16 bytes, the port): of an IPv4 address in IPv6 form, what is mapped."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    host = getattr(host, "ipv4_mapped", None) or host
    return host.version, host.packed, address[1]
