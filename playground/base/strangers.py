"""In a world that we have launched: keeps its connections from other users of this machine, as
loopback is open to all of them.

Neither torch's store nor gloo asks who connects. But no rank has to connect to gloo any more once a
process group is formed: from then on, until the next is being formed, the kernel drops whatever
arrives where gloo listens, and it says whose the connections are that were there before. To the
store, processes of the ranks may connect later too: what they send reaches it once the kernel has
said whose they are. (Linux only.) The ranks of nccl connect later too.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable

from playground.base.connections import (
    duplicate,
    gloo_sockets,
    is_listening,
    port_of,
    store_sockets,
)
from playground.base.socket_filter import NO_DATA, NOTHING, has_filter, put_filter, remove_filter

ACCEPT_LIMIT = 5.0
"""Seconds in which whatever has connected must be accepted: the thread that does so has little else
to do."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
OWNER = struct.Struct("80xII")
"""User and inode in the kernel's answer. Source: struct inet_diag_msg, sock_diag(7)"""
BETWEEN_LOOKS = 0.1
"""Seconds between two looks for connections to the store. The other end sends what was dropped
again after 0.2 s, then after 0.4 s more, and so on. (epoll does not tell of a connection that
another thread has accepted meanwhile.)"""


class StrangerConnected(Exception):
    """A process of another user has connected to this one."""


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
    """Let what this user sends come through; hang up on others."""
    with contextlib.suppress(OSError):  # the other end has hung up
        if ask_owner(kernel, connection.getpeername(), connection.getsockname()) == os.geteuid():
            return remove_filter(connection)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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


def pack_address(address: tuple[str, int]) -> tuple[int, bytes, int]:
    """(4 or 6, the IP address padded to 16 bytes, the port): of an IPv4 address in IPv6 form, what
    is mapped."""
    host = ipaddress.ip_address(address[0])
    host = getattr(host, "ipv4_mapped", None) or host
    return host.version, host.packed, address[1]
