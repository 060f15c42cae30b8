"""How ranks meet, at a store: our own, or one at env://, tcp:// or file://. And how they part.

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
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from playground.runtime.backends import BACKENDS
from playground.runtime.errors import RendezvousTimeout, UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT_TIMEOUT = 60.0
"""Seconds that ranks wait for each other, at the meeting and in any operation."""
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
GET_ADDRESS = 0x8915  # SIOCGIFADDR
LEAVE_TIMEOUT = timedelta(seconds=15)
"""How long rank 0 waits for the others to leave: longer than a launcher does, who then knows whom it waited for."""
MAX_NAMED = 8
"""Of missing ranks: more would not fit a line."""
NOBODY = "nobody"
"""A word and not an empty one: torch's older store takes 0.2 s to hand out what is empty."""
READ_GRACE = 0.5
"""Seconds for which rank 0, when it has given up, goes on serving the store: all others read there who is missing."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


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
    """Of the file that is the store, for file://."""

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


def check_method(init_method: str | None) -> None:
    """Raise `UsageError` if the ranks of one host cannot meet in this way."""
    if init_method is None or init_method == "env://":
        return
    scheme, host, _, path = parse_init_method(init_method)
    if scheme == "tcp" and not is_loopback(host):
        raise UsageError(f"--init-method {init_method}: one host's ranks meet on loopback, e.g. tcp://127.0.0.1:29500")
    if scheme == "file" and os.path.exists(path):
        raise UsageError(f"--init-method {init_method}: the file is there already; a world needs a fresh one")
    if scheme == "file" and not os.access(os.path.dirname(path), os.W_OK):
        raise UsageError(f"--init-method {init_method}: the folder does not exist or is not writable")


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
    if url.scheme == "file" and url.path and not url.netloc:
        return "file", "", 0, url.path
    if url.scheme == "tcp" and host and port is not None:
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


def interface_towards(host: str) -> str | None:
    """The network interface over which this machine reaches `host`; None where we cannot tell (Linux and IPv4 only).

    Left to itself, gloo takes the one its own host name resolves to, on many machines loopback: then no other host
    reaches it (gloo#367, pytorch/pytorch#68726).
    """
    if sys.platform != "linux":
        return None
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket: this asks for the route, and sends nothing
        except OSError:
            return None
        ours = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if ioctl(probe, GET_ADDRESS, name.encode().ljust(40, b"\0"))[20:24] == ours:
                    return name
    return None


def connect(
    rendezvous: Rendezvous, listener: socket.socket | None, rank: int, size: int, timeout: timedelta
) -> dist.Store:
    """The store of this rendezvous, through which the ranks find each other. It goes when the rank that serves it does.

    The same for every method: what torch does for env:// and tcp://, except that rank 0, who serves the store (on the
    `listener`, if it is handed one), does not wait here for the others. `await_everyone` does, and says who is missing.
    Raises `RendezvousTimeout` if nobody serves the store in time.
    """
    import torch.distributed as dist

    for backend in BACKENDS.values():
        if rendezvous.local:
            os.environ[backend.interface_variable] = LOOPBACK_INTERFACE
    variable = BACKENDS["gloo"].interface_variable
    if not rendezvous.local and variable not in os.environ and (name := interface_towards(rendezvous.host)):
        os.environ[variable] = name
    if rendezvous.path:
        return dist.FileStore(rendezvous.path, size)
    os.environ.update(MASTER_ADDR=rendezvous.host, MASTER_PORT=str(rendezvous.port))
    serves = rendezvous.served and rank == 0
    # Not libuv: in older torch (2.6) its store cannot take over a socket that is listening already.
    fd = {"master_listen_fd": listener.detach(), "use_libuv": False} if serves and listener else {}
    try:
        store = dist.TCPStore(
            rendezvous.host, rendezvous.port, size, is_master=serves, timeout=timeout, wait_for_workers=False, **fd
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        who = "rank 0, which is to serve the store there," if rendezvous.served else "torchrun, which serves the store,"
        raise RendezvousTimeout(
            f"rank {rank} of {size} waited {timeout.total_seconds():g} s at {rendezvous.place}: {who} did not come"
            if not serves
            else f"rank 0 of {size} cannot serve the store at {rendezvous.place}: {first_line(error)}"
        ) from error
    # torchrun's store may have seen an earlier attempt of the same world
    return dist.PrefixStore(f"attempt {os.environ.get(ATTEMPT, 0)}", store)


def await_everyone(store: dist.Store, rendezvous: Rendezvous, rank: int, size: int, timeout: timedelta) -> None:
    """Return when every rank has come this far. If that takes too long, raise `RendezvousTimeout`: who is missing.

    A backend would wait for them as well, but without end (nccl), or without a word on who is missing (gloo).
    """
    import torch.distributed as dist

    store.set(f"rank {rank} is here", "")
    if store.add("here", 1) == size:
        store.set("missing", NOBODY)
    try:
        store.wait(["missing"], timeout)
    except dist.DistNetworkError as error:
        raise RendezvousTimeout(
            f"rank {rank} of {size} lost the store at {rendezvous.place}: whoever served it has gone"
        ) from error
    except RuntimeError:  # a file's store has no error of its own
        absent = [str(other) for other in range(size) if not store.check([f"rank {other} is here"])]
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent[:MAX_NAMED])}{', …' * (len(absent) > MAX_NAMED)}"
        store.set("missing", who)  # whoever gives up first says it for all
        if rank == 0:
            time.sleep(READ_GRACE)
    if (who := store.get("missing").decode()) != NOBODY:
        raise RendezvousTimeout(
            f"rank {rank} of {size} waited {timeout.total_seconds():g} s at {rendezvous.place}: {who} did not come"
        )


def leave_together(store: dist.Store, rank: int, size: int) -> None:
    """Tell the others, in the store, that this rank has left; rank 0, who may be serving it, waits for all of them.

    They use it until they have left: nccl has threads that ask it whether the others are well.
    """
    import torch.distributed as dist

    # Results are in. If somebody has been killed since, their launcher says so.
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        if store.add("gone", 1) == size:
            store.set("everyone is gone", "")
        if rank == 0:
            store.wait(["everyone is gone"], LEAVE_TIMEOUT)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
