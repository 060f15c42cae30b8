"""Where ranks meet: at a store of our own, or at the one that MASTER_ADDR and MASTER_PORT name.

On one host the launcher binds a loopback address before any rank exists, and a process of its own
serves the store on that very socket: see `store_server`. So there is no port to collide with, no
moment in which somebody else can take it, and nothing that listens on an outside interface (a plain
`TCPStore` listens on all of them). Source:
https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from enum import Enum
from fcntl import ioctl

from playground.base.errors import UsageError

MAX_RANKS = 128
"""On one host: beyond it the sockets of a full mesh, size² of them, meet the limits of common
machines."""
DEFAULT_TIMEOUT = 60.0
"""Seconds that ranks wait for each other, at the rendezvous and in any operation."""
LOOPBACK_INTERFACE = "lo"
GET_ADDRESS = 0x8915  # SIOCGIFADDR


class Server(Enum):
    """The process that serves the store."""

    RANK_0 = "rank 0, which is to serve the store there,"
    TORCHRUN = "torchrun, which serves the store,"
    PROCESS = "the process that serves the store"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one world meet."""

    host: str = "127.0.0.1"
    port: int = 0
    local: bool = True
    """All ranks are on this host: nothing may listen anywhere but on loopback."""
    server: Server = Server.RANK_0

    @property
    def place(self) -> str:
        """Where that is, in a message."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose. Raises `UsageError` if the port cannot be
    had, or a loopback address not be reached."""
    if is_loopback(host):
        try:
            address_towards(host)
        except OSError as error:
            raise UsageError(
                f"this host cannot reach {host} ({error.strerror}), where ranks meet: ip link set "
                f"{LOOPBACK_INTERFACE} up"
            ) from None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UsageError(f"cannot listen on {host}:{port} ({why}): choose another port") from None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_host(host: str) -> bool:
    """Whether a name or an address is one of this machine's own."""
    try:
        ours = address_towards(host)
        theirs = {each[4][0] for each in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)}
    except OSError:
        return False
    return ours in theirs or is_loopback(ours)


def address_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """This machine's address on the way to `host`. Raises `OSError` if there is no way."""
    family = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: this asks for the route, and sends nothing
        return probe.getsockname()[0]


def interface_towards(host: str) -> str | None:
    """The network interface over which this machine reaches `host`; None where we cannot tell (IPv4
    only).

    Left to itself, gloo takes the one its own host name resolves to, on many machines loopback:
    then no other host reaches it (gloo#367, pytorch/pytorch#68726).
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        ours = socket.inet_aton(address_towards(host, socket.AF_INET))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if ioctl(probe, GET_ADDRESS, name.encode().ljust(40, b"\0"))[20:24] == ours:
                    return name
    return None
