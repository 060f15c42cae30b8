"""The ends of other ranks' processes: on this host the kernel tells of them, and of a neighbour
elsewhere the connection to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from playground.base.ranks import name_ranks
from playground.base.signals import describe_signal
from playground.explain.hang.wording import Diagnosis

LINK_TIMEOUT = 2.0
"""Seconds that connecting to a rank of another host may take."""


@dataclass(frozen=True)
class Peer:
    """The process of a rank, as the others know it."""

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
    deadlock: Diagnosis | None = None
    """If ranks wait for each other and none is lost."""

    def __str__(self) -> str:
        return f"lost {name_ranks(self.ranks)} ({self.reason})"


class PeerEnds:
    """Where the ends of other ranks are to be read, from now on until it is closed."""

    def __init__(self, own: Peer, peers: Sequence[Peer]) -> None:
        """`own` is this rank among the `peers`, which are all ranks of the world, in order."""
        self.sources: dict[Any, Peer] = {}
        """The peers by what is ready when their process ends: a pidfd, or a connection to a
        neighbour elsewhere."""
        self.wakeup, self.wakeups = socket.socketpair()
        neighbours = {(own.rank + step) % len(peers) for step in (1, -1)}
        for peer in peers:
            if peer.machine == own.machine and peer.rank != own.rank:
                self.sources[open_pidfd(peer.pid)] = peer
            elif peer.rank in neighbours:
                with contextlib.suppress(OSError):  # there may be no way to it
                    self.sources[
                        socket.create_connection((peer.address, peer.port), LINK_TIMEOUT)
                    ] = peer

    def wait(self, seconds: float) -> list[tuple[Peer, Loss | None]]:
        """The peers whose processes have ended, and how; None where another rank of the peer's host
        may say it.

        Returns when there is such a peer, when `wakeup` is closed, or after `seconds`.
        """
        return [
            self.read(each)
            for each in wait([*self.sources, self.wakeups], seconds)
            if each in self.sources
        ]

    def read(self, source: Any) -> tuple[Peer, Loss | None]:
        peer = self.sources.pop(source)
        if isinstance(source, socket.socket):
            source.close()
            return peer, None
        end = describe_end(source, peer.pid)
        os.close(source)
        return peer, Loss([peer.rank], f"{end} on {peer.host}")

    def close(self) -> None:
        """Let go of all that is left."""
        for source in self.sources:
            if isinstance(source, socket.socket):
                source.close()
            else:
                os.close(source)
        self.wakeups.close()


def open_pidfd(pid: int) -> int | socket.socket:
    """A descriptor that is ready when the process ends: if it has ended, a connection whose other
    end is closed."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        gone, end = socket.socketpair()
        end.close()
        return gone


def describe_end(pidfd: int, pid: int) -> str:
    """How a process ended, which need not be a child of this one: as its parent will hear by
    wait(), and "ended" if that has asked already."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
        signal.pidfd_send_signal(pidfd, 0)  # refused if the number may be another's by now
    except (OSError, ValueError):
        return "ended"
    if os.WIFSIGNALED(status):
        return f"killed by {describe_signal(os.WTERMSIG(status))}"
    code = os.WEXITSTATUS(status)
    if code - 128 in [*signal.Signals]:  # it has handled that one, and left
        return f"ended by {describe_signal(code - 128)}"
    return f"exited with code {code}"
