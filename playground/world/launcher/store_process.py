"""The launcher's hold on the process that serves the store of a world."""

from __future__ import annotations

import socket

from playground.world.launcher import fork_client, forked_process
from playground.world.rendezvous.rendezvous import Rendezvous, Server
from playground.world.rendezvous.store_server import serve_store

ANSWER_LIMIT = 10.0
"""Seconds that the server has to answer."""


class StoreProcess:
    """A process that serves the store at `listener` until `end`, or until this one has ended. It
    comes from the fork server of a rank, if one is given, and ends with that at the latest. Raises
    `ForkServerFailed` if there can be none."""

    def __init__(
        self, listener: socket.socket, own_server: fork_client.ForkServerClient | None = None
    ) -> None:
        self.process, self.line = forked_process.start(
            serve_store, listener, server=own_server, ends_server=False, imports_program=False
        )

    def is_used(self) -> bool:
        """Whether a process has put a key into the store, as those do that form a process group.
        True if the server does not answer."""
        try:
            self.line.send("is it used?")
            return bool(self.line.recv()) if self.line.poll(ANSWER_LIMIT) else True
        except (EOFError, OSError):
            return True

    def end(self) -> None:
        """End it, and do not wait for that: nothing depends on it any more."""
        self.line.close()
        self.process.kill()
        self.process.close()


def find_place(listener: socket.socket) -> Rendezvous:
    """Where ranks meet whose store is to be served at `listener`."""
    return Rendezvous(port=listener.getsockname()[1], server=Server.PROCESS)
