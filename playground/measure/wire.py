"""The wire itself, as fast as this machine has it, to hold collectives against.

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

from playground.runtime import Impossible, device

PIECE = 512 * 1024
"""Bytes, at most, in one call: they are then still in a core's cache at the other end. Found by trying."""
PATIENCE = 30.0
"""Seconds in which the other end must be there."""


class Wire(Protocol):
    what: str

    def carry(self, nbytes: int) -> Callable[[], object]:
        """What moves `nbytes` once. A rank with no end of the wire does nothing."""


@contextlib.contextmanager
def wire(rank: int, size: int, hosts: set[str]) -> Iterator[Wire]:
    """The wire of this world. Every rank must call this."""
    if device().type == "cuda":
        yield Copy()
        return
    if size == 1:
        raise Impossible("--limit with 1 rank: a wire has two ends, use at least -n 2")
    if len(hosts) > 1:
        raise Impossible(f"--limit with ranks on {len(hosts)} hosts: it measures loopback, leave it out")
    with contextlib.closing(connected(rank)) as end:
        yield Loopback(end)


def connected(rank: int) -> socket.socket:
    """This rank's end of the connection; a socket that leads nowhere on ranks that have none."""
    port = [0]
    with socket.socket() as listener:
        if rank == 0:
            listener.settimeout(PATIENCE)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            port = [listener.getsockname()[1]]
        dist.broadcast_object_list(port, src=0)
        if rank > 1:
            return socket.socket()
        end = listener.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", port[0]), PATIENCE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setblocking(False)
    return end


class Loopback:
    what = "TCP on loopback between ranks 0 and 1, both ways at once"

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def carry(self, nbytes: int) -> Callable[[], object]:
        try:
            self.end.getpeername()
        except OSError:  # not one of the two
            return lambda: None
        out, into = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        return lambda: self.exchange(out, into)

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send one and fill the other, whichever goes on."""
        while out or into:
            before = len(out) + len(into)
            if out:
                with contextlib.suppress(BlockingIOError):
                    out = out[self.end.send(out[:PIECE]) :]
            if into:
                with contextlib.suppress(BlockingIOError):
                    arrived = self.end.recv_into(into[:PIECE])
                    if not arrived:
                        raise ConnectionResetError("Connection closed by peer")
                    into = into[arrived:]
            if len(out) + len(into) == before:
                select.select([self.end] if into else [], [self.end] if out else [], [])


class Copy:
    what = "a copy within the memory of the GPU"

    def carry(self, nbytes: int) -> Callable[[], object]:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device())
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)
