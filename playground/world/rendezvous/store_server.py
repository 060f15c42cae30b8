"""The process that serves the store of the ranks that we have launched. It is none of them, so that
each may end when its program does, rank 0 too: as under torchrun, whose agent serves the store.

As long as ranks are starting it hears whoever connects, and after that only processes of its own
user. Does not import torch until it serves.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from playground.base.strangers import StrangerConnected, admit_to_store, shut_out_strangers
from playground.base.threads import OurThread
from playground.world.rendezvous.keys import ALONE, CLOSE

if TYPE_CHECKING:
    import torch.distributed as dist

FOREVER = timedelta(days=1000)


def serve_store(line: Connection, listener: socket.socket) -> NoReturn:
    """The life of the process: serve the store at `listener` until the other end of `line` is
    closed. To anything that comes there, answer whether somebody has put a key into the store."""
    import torch.distributed as dist

    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=FOREVER,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    OurThread(
        target=admit_ranks, args=(store, port), name="admit to the store", daemon=True
    ).start()
    while True:
        try:
            line.recv()
        except (EOFError, OSError):
            os._exit(0)
        # a client of this question only, as the thread waits with the store's own
        client = dist.TCPStore(host, port, wait_for_workers=False)
        line.send(client.num_keys() > 0)


def admit_ranks(store: dist.Store, port: int) -> None:
    """The body of a thread: once all have come, say whether a stranger has, and admit no other."""
    store.wait([CLOSE], FOREVER)
    try:
        shut_out_strangers(port)
    except StrangerConnected as error:
        store.set(ALONE, str(error))
    else:
        store.set(ALONE, "")
    admit_to_store(port, lambda: False)


def close_store(store: dist.Store) -> None:
    """In a rank, when all have come: the server hears only processes of this user from now on.
    Raises `StrangerConnected` if another one's has come, too."""
    store.set(CLOSE, "")
    if stranger := store.get(ALONE).decode():
        raise StrangerConnected(stranger)
