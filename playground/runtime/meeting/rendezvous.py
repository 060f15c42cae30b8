"""Where ranks meet: at a store of our own, or at one that env://, tcp:// or file:// names.

On one host the launcher binds a loopback address before any rank exists, and rank 0 serves the store on that very
socket. So there is no port to collide with, no moment in which somebody else can take it, and nothing that listens
on an outside interface (a plain `TCPStore` listens on all of them).
Source: https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from fcntl import ioctl
from urllib.parse import urlsplit

from playground.runtime.errors import UsageError

DEFAULT_TIMEOUT = 60.0
"""Seconds that ranks wait for each other, at the meeting and in any operation."""
LOOPBACK_INTERFACE = "lo"
GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one world meet."""

    host: str = "127.0.0.1"
    port: int = 0
    local: bool = True
    """All ranks are on this host: nothing may listen anywhere but on loopback."""
    served: bool = True
    """Rank 0 serves the store; otherwise torchrun has done so already."""
    path: str = ""
    """Path of the file that is the store, for file://."""

    @property
    def place(self) -> str:
        """Where that is, in a message."""
        return self.path or f"{bracket_ipv6(self.host)}:{self.port}"


def prepare_rendezvous(init_method: str | None = None) -> tuple[Rendezvous, socket.socket | None]:
    """For a world on this host: the rendezvous, and the socket on which rank 0 will serve the store.

    Raises `UsageError` for a method that `check_method` refuses and for a port that is taken.
    """
    check_method(init_method)
    if init_method is None or init_method == "env://":
        listener = listen("127.0.0.1", 0)
        return Rendezvous(port=listener.getsockname()[1]), listener
    scheme, host, port, path = parse_init_method(init_method)
    if scheme == "file":
        return Rendezvous(path=path), None
    listener = listen(host, port)
    return Rendezvous(host=host, port=listener.getsockname()[1]), listener


def remove_store(init_method: str | None) -> None:
    """Remove the file that was the store of a world which has ended: no other world can meet there."""
    if init_method and init_method.startswith("file:"):
        with contextlib.suppress(OSError):  # usually it has gone with the world, or no rank ever came to it
            os.unlink(parse_init_method(init_method)[3])


def check_method(init_method: str | None) -> None:
    """Raise `UsageError` if the ranks of one host cannot meet in this way."""
    if init_method is None or init_method == "env://":
        return
    scheme, host, _, path = parse_init_method(init_method)
    if scheme == "tcp" and not is_loopback(host):
        raise UsageError(f"--init-method {init_method}: one host's ranks meet on loopback, e.g. tcp://127.0.0.1:29500")
    if scheme == "file" and os.path.exists(path):
        raise UsageError(f"--init-method {init_method}: the file is there already; use a new one")


def bracket_ipv6(host: str) -> str:
    """A host as addresses spell it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def parse_init_method(init_method: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, path) of a tcp:// or file:// method. Raises `UsageError` for anything else."""
    try:
        url = urlsplit(init_method)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise UsageError(f"--init-method {init_method}: {error}") from None
    if init_method == f"file://{url.path}" and url.path.startswith("/"):
        return "file", "", 0, url.path
    if host and port is not None and init_method == f"tcp://{bracket_ipv6(host)}:{port}":
        return "tcp", host, port, ""
    raise UsageError(f"--init-method {init_method}: use env://, tcp://HOST:PORT or file:///PATH")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose. Raises `UsageError` if the port cannot be had."""
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


def address_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """This machine's address on the way to `host`. Raises `OSError` if there is no way."""
    family = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: this asks for the route, and sends nothing
        return probe.getsockname()[0]


def interface_towards(host: str) -> str | None:
    """The network interface over which this machine reaches `host`; None where we cannot tell (IPv4 only).

    Left to itself, gloo takes the one its own host name resolves to, on many machines loopback: then no other host
    reaches it (gloo#367, pytorch/pytorch#68726).
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        ours = socket.inet_aton(address_towards(host, socket.AF_INET))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if ioctl(probe, GET_ADDRESS, name.encode().ljust(40, b"\0"))[20:24] == ours:
                    return name
    return None
