"""The wire itself, as fast as this machine has it: what collectives are held against.

Between CPUs: a plain TCP connection, both ends sending as many bytes as they receive, at once, as neighbours in a ring
do. It joins rank 0 and the first rank on another host, where there is one, for that link is then the limit of all;
ranks 0 and 1, on loopback, where all are on one host. On a GPU of one host: a copy from its memory to its memory. Its
bandwidth is bytes one way / time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from playground.runtime import UsageError, device
from playground.runtime.meeting.connections import address_towards

LOOPBACK = "127.0.0.1"
PIECE = 512 * 1024
"""Bytes, at most, in one call: they are then still in a core's cache at the other end. Found by trying."""
TIMEOUT = 30.0
"""Seconds in which the two ends must be connected."""


@dataclass(frozen=True)
class Wire:
    description: str
    transfer: Callable[[int], Callable[[], object]]
    """Given a number of bytes, a call that moves them once. A rank with no end of the wire does nothing."""


@contextlib.contextmanager
def open_wire(rank: int, size: int, hosts: Sequence[str]) -> Iterator[Wire]:
    """The wire of this world, `hosts` being every rank's host. Every rank must call this. Raises `UsageError` where
    there is none to measure."""
    several = len(set(hosts)) > 1
    if device().type == "cuda" and not several:
        yield Wire("a copy within the memory of the GPU", copy)
        return
    if size == 1:
        raise UsageError("--limit with 1 rank: a wire has two ends, use at least -n 2")
    peer = next(other for other in range(1, size) if not several or hosts[other] != hosts[0])
    where, address = "on loopback", LOOPBACK
    if several:  # this host's address on the way to rank 0's; where ranks met at a file, that of its own name
        where, address = "from host to host", address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())
    with contextlib.closing(connect(rank, peer, address)) as end:
        yield Wire(f"TCP {where} between ranks 0 and {peer}, both ways at once", partial(both_ways, end))


def connect(rank: int, peer: int, address: str) -> socket.socket:
    """This rank's end of a connection between ranks 0 and `peer`; an unconnected socket on ranks that have none. The
    peer listens, at its `address`, because what a host calls itself need not lead to it from another one. Raises
    `UsageError` if the two do not reach each other."""
    where = [(address, 0)]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        if rank == peer:
            listener.settimeout(TIMEOUT)
            listener.bind((address, 0))
            listener.listen(1)
            where = [listener.getsockname()[:2]]
        dist.broadcast_object_list(where, src=peer)
        if rank not in (0, peer):
            return socket.socket()
        try:
            end = listener.accept()[0] if rank == peer else socket.create_connection(where[0], TIMEOUT)
        except OSError as error:
            raise UsageError(
                f"--limit: rank 0 does not reach rank {peer} at {where[0][0]} by TCP ({error}): leave it out, or let "
                f"a firewall pass connections between these hosts"
            ) from None
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setblocking(False)
    return end


def both_ways(end: socket.socket, nbytes: int) -> Callable[[], object]:
    """A call that sends and receives `nbytes` over a TCP connection, at once."""
    try:
        end.getpeername()
    except OSError:  # this rank is not one of the two
        return lambda: None
    to_send, to_fill = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    return lambda: exchange(end, to_send, to_fill)


def exchange(end: socket.socket, to_send: memoryview, to_fill: memoryview) -> None:
    """Send one and fill the other, whichever can proceed."""
    while to_send or to_fill:
        before = len(to_send) + len(to_fill)
        if to_send:
            with contextlib.suppress(BlockingIOError):
                to_send = to_send[end.send(to_send[:PIECE]) :]
        if to_fill:
            with contextlib.suppress(BlockingIOError):
                received = end.recv_into(to_fill[:PIECE])
                if not received:
                    raise ConnectionResetError("Connection closed by peer")
                to_fill = to_fill[received:]
        if len(to_send) + len(to_fill) == before:
            select.select([end] if to_fill else [], [end] if to_send else [], [])


def copy(nbytes: int) -> Callable[[], object]:
    """A call that copies `nbytes` within the memory of this rank's GPU."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device())
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)
