"""The wire itself, as fast as this machine has it: what collectives are held against.

Between CPUs: a plain TCP connection on loopback between ranks 0 and 1, both sending as many bytes as they receive, at
once, as neighbours in a ring do. On a GPU: a copy from its memory to its memory. Its bandwidth is bytes one way / time.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from playground.runtime import UsageError, device

PIECE = 512 * 1024
"""Bytes, at most, in one call: they are then still in a core's cache at the other end. Found by trying."""
TIMEOUT = 30.0
"""Seconds in which the two ends must be connected."""


class Wire(Protocol):
    description: str

    def transfer(self, nbytes: int) -> Callable[[], object]:
        """A call that moves `nbytes` once. A rank with no end of the wire does nothing."""


@contextlib.contextmanager
def open_wire(rank: int, size: int, hosts: set[str]) -> Iterator[Wire]:
    """The wire of this world. Every rank must call this. Raises `UsageError` where there is none to measure."""
    if device().type == "cuda":
        yield Copy()
        return
    if size == 1:
        raise UsageError("--limit with 1 rank: a wire has two ends, use at least -n 2")
    if len(hosts) > 1:
        raise UsageError(f"--limit with ranks on {len(hosts)} hosts: it measures loopback, leave it out")
    with contextlib.closing(connect(rank)) as end:
        yield Loopback(end)


def connect(rank: int) -> socket.socket:
    """This rank's end of the connection; an unconnected socket on ranks that have none."""
    port = [0]
    with socket.socket() as listener:
        if rank == 0:
            listener.settimeout(TIMEOUT)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            port = [listener.getsockname()[1]]
        dist.broadcast_object_list(port, src=0)
        if rank > 1:
            return socket.socket()
        end = listener.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", port[0]), TIMEOUT)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setblocking(False)
    return end


class Loopback:
    description = "TCP on loopback between ranks 0 and 1, both ways at once"

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def transfer(self, nbytes: int) -> Callable[[], object]:
        try:
            self.end.getpeername()
        except OSError:  # this rank is not one of the two
            return lambda: None
        to_send, to_fill = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        return lambda: self.exchange(to_send, to_fill)

    def exchange(self, to_send: memoryview, to_fill: memoryview) -> None:
        """Send one and fill the other, whichever can go on."""
        while to_send or to_fill:
            before = len(to_send) + len(to_fill)
            if to_send:
                with contextlib.suppress(BlockingIOError):
                    to_send = to_send[self.end.send(to_send[:PIECE]) :]
            if to_fill:
                with contextlib.suppress(BlockingIOError):
                    received = self.end.recv_into(to_fill[:PIECE])
                    if not received:
                        raise ConnectionResetError("Connection closed by peer")
                    to_fill = to_fill[received:]
            if len(to_send) + len(to_fill) == before:
                select.select([self.end] if to_fill else [], [self.end] if to_send else [], [])


class Copy:
    description = "a copy within the memory of the GPU"

    def transfer(self, nbytes: int) -> Callable[[], object]:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device())
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)
