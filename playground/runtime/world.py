"""init_process(): N processes become one world. The only place that creates and destroys a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import backends, host
from playground.runtime.errors import RankFailed
from playground.runtime.rendezvous import DEFAULT_TIMEOUT, Rendezvous
from playground.runtime.store import await_everyone, connect, leave_together


def init_process(
    rank: int,
    size: int,
    fn: Callable[..., Any],
    backend: str = "gloo",
    *,
    args: tuple[Any, ...] = (),
    rendezvous: Rendezvous,
    listener: socket.socket | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    joined: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    before_leaving: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """Join the world as `rank` of `size`, run `fn(rank, size, *args)`, leave, return what `fn` returned.

    `timeout` (seconds) holds for the meeting and for every operation of the group; `joined` says that the world is not
    of our making. `before_leaving(result)` runs while the group still stands and decides what is returned: there the
    ranks wait for each other, because all leave together. (A communicator of nccl ends only when its peers' do.) If
    `fn` raises, the group is left as it is: destroying it beside a peer that is still waiting can itself hang
    (pytorch/torchtitan#1342), so whoever started this process must end it.

    Raises `RendezvousTimeout` if the ranks do not find each other in time, `RankFailed` if the backend then fails.
    """
    local_rank = rank if local_rank is None else local_rank
    local_size = size if local_size is None else local_size
    torch.set_num_threads(host.threads_per_rank(local_size))
    # where torch and others look for it, whoever started this process
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    host.use_batch_scheduling()
    host.keep_freed_memory()
    used = backends.get_backend(backend)
    device = used.claim_device(local_rank, local_size, joined)
    limit = timedelta(seconds=timeout)
    store = connect(rendezvous, listener, rank, size, limit)
    await_everyone(store, rendezvous, rank, size, limit)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=limit,
            device_id=device,
        )  # fmt: skip
    except dist.DistError as error:
        raise RankFailed(rank, size, f"could not enter the world: {used.explain_init_failure(error)}") from error
    result = before_leaving(fn(rank, size, *args))
    used.drain()
    dist.destroy_process_group()
    leave_together(store, rank, size)
    return result
