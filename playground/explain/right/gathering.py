"""In a rank that torchrun, Slurm or a person has started: its log is sent to rank 0 through the
store, when the program has ended.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from playground.base.files import write_file
from playground.explain.right.log import (
    BETWEEN_LOOKS,
    FORMAT,
    LIMIT,
    LIMIT_OF_FAILED,
    file_name,
)
from playground.world.rendezvous.environment import RankEnv
from playground.world.rendezvous.peers import rank_0_has_left
from playground.world.rendezvous.store import connect_as_client

CONNECT_LIMIT = timedelta(seconds=2)
PART = "playground check"
"""The part of the store that has the logs."""


def gather_logs(folder: Path, env: RankEnv, *, has_failed: bool) -> None:
    """Send this rank's log in `folder` to rank 0, which writes those of all ranks into its own.
    Where there is no store, or a log cannot be read or written, rank 0 knows less."""
    if rank_0_has_left.is_set():
        return
    with contextlib.suppress(dist.DistError, OSError):
        # torch would try for seconds to reach a store that is gone, and say so on stderr
        where = env.rendezvous
        socket.create_connection((where.host, where.port), CONNECT_LIMIT.total_seconds()).close()
        store = dist.PrefixStore(PART, connect_as_client(env, CONNECT_LIMIT))
        if env.rank:
            store.set(str(env.rank), zlib.compress((folder / file_name(env.rank)).read_bytes()))
        else:
            seconds = LIMIT_OF_FAILED if has_failed else LIMIT
            receive_logs(store, folder, range(1, env.size), seconds)


def receive_logs(store: dist.Store, folder: Path, ranks: range, seconds: float) -> None:
    """Write the logs of these ranks into `folder`, those that come in this time. Raises `OSError`
    and torch's errors."""
    end = time.monotonic() + seconds
    for rank in ranks:
        # not by `wait`: torch complains on stderr when its time is over
        while not store.check([str(rank)]):
            if time.monotonic() > end:
                break
            time.sleep(BETWEEN_LOOKS)
        else:
            with contextlib.suppress(zlib.error):
                log = zlib.decompressobj().decompress(store.get(str(rank)), FORMAT.size)
                write_file(folder / file_name(rank), log)
