"""The ends of other ranks' processes, and of the hosts they are on, as one rank of a world notices them.

Ranks of one host hold a descriptor of each other's process: it tells the end of the process, and the system why. Each
rank also holds a connection to the ranks before and after it, if they are on other hosts: it breaks when the process
ends, and when the host falls silent. These connections carry nothing, and no process needs to serve them: the kernels
keep them up, so that a rank that is busy, stopped or being debugged is not taken for lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from playground.runtime.connections import SILENCE, keep_alive
from playground.runtime.host import namespace_id
from playground.runtime.process_end import describe_end

LINK_TIMEOUT = 2.0
"""Seconds that connecting to a rank of another host may take."""


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others of its process."""

    rank: int
    host: str
    machine: str
    """The same for processes that see each other's process numbers."""
    pid: int
    address: str
    port: int


@dataclass(frozen=True)
class Loss:
    """The ranks that were lost first, and how."""

    ranks: list[int]
    reason: str

    def __str__(self) -> str:
        return f"lost rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} ({self.reason})"


class PeerEnds:
    """Where the ends of other ranks are to be read, from now on until it is closed."""

    def __init__(self, own: Peer, peers: Sequence[Peer]) -> None:
        """`own` is this rank among the `peers`, which are all ranks of the world, in order."""
        self.peers = peers
        self.ended_before: list[Peer] = []
        """Peers whose processes were gone already."""
        self.selector = selectors.DefaultSelector()
        self.bell, ear = socket.socketpair()
        self.selector.register(ear, selectors.EVENT_READ)
        neighbours = {(own.rank + step) % len(peers) for step in (1, -1)}
        for peer in peers:
            if peer.machine == own.machine and peer.rank != own.rank and hasattr(os, "pidfd_open"):
                self.observe_process(peer)
            elif peer.rank in neighbours:
                self.observe_host(peer)

    def observe_process(self, peer: Peer) -> None:
        """From now on, hear of the end of this process."""
        try:
            self.selector.register(os.pidfd_open(peer.pid), selectors.EVENT_READ, peer)
        except ProcessLookupError:  # already
            self.ended_before.append(peer)

    def observe_host(self, peer: Peer) -> None:
        """From now on, hear of the end of this process or of the network to it, if there is a way to it."""
        with contextlib.suppress(OSError):
            link = socket.create_connection((peer.address, peer.port), LINK_TIMEOUT)
            keep_alive(link)
            self.selector.register(link, selectors.EVENT_READ, peer)

    def wait(self, seconds: float) -> list[tuple[Peer, Loss | None]]:
        """Whose processes have ended, and how; None where the rank's own host knows better.

        Returns when there is something to tell, when somebody wakes it, or after so many seconds.
        """
        before, self.ended_before = self.ended_before, []
        keys = [key for key, _ in self.selector.select(0 if before else seconds)]
        return [*((peer, None) for peer in before), *(self.read(key) for key in keys if key.data)]

    def wake(self) -> None:
        """Have the thread that waits return."""
        self.bell.close()

    def read(self, key: selectors.SelectorKey) -> tuple[Peer, Loss | None]:
        """Whose end is to be read at `key`, and how it came."""
        peer: Peer = key.data
        loss = None
        if not isinstance(key.fileobj, socket.socket):
            loss = Loss([peer.rank], f"{describe_end(key.fd, peer.pid)} on {peer.host}")
        elif is_silent(key.fileobj):
            ranks = [each.rank for each in self.peers if each.machine == peer.machine]
            loss = Loss(ranks, f"{peer.host} has been silent for {SILENCE} s")
        self.forget(key)
        return peer, loss

    def forget(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fileobj)
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)

    def close(self) -> None:
        """Let go of all that is left."""
        for key in list(self.selector.get_map().values()):
            self.forget(key)
        self.selector.close()


def is_silent(link: socket.socket) -> bool:
    """Whether it broke because no answer came; otherwise the process at its other end has ended."""
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ETIMEDOUT, errno.EHOSTUNREACH)


def machine() -> str:
    """This machine, or this container, if it has process numbers of its own."""
    return namespace_id("pid")
