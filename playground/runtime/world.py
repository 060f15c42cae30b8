"""init_process(): N processes become one world. The only place that creates and destroys a process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import devices, host
from playground.runtime.errors import NeverMet
from playground.runtime.rendezvous import DEFAULT_TIMEOUT, Meeting, meet


def init_process(
    rank: int,
    size: int,
    fn: Callable[..., Any],
    backend: str = "gloo",
    *,
    args: tuple[Any, ...] = (),
    meeting: Meeting,
    listener: socket.socket | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    before_leaving: Callable[[Any], Any] = lambda result: result,
) -> Any:
    """Join the world as `rank` of `size`, run `fn(rank, size, *args)`, leave, return what `fn` returned.

    `timeout` (seconds) holds for the meeting and for every operation of the group. `before_leaving(result)` runs
    while the group still stands and decides what is returned: there the ranks wait for each other, because the
    store goes when rank 0 does. If `fn` raises, the group is left as it is: destroying it beside a peer that is
    still waiting can itself hang (pytorch/torchtitan#1342), so whoever started this process must end it.

    Raises `NeverMet` if the ranks do not find each other in time.
    """
    local_rank = rank if local_rank is None else local_rank
    local_size = size if local_size is None else local_size
    torch.set_num_threads(devices.threads_per_rank(local_size))
    # where torch and others look for it, whoever started this process
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    host.use_batch_scheduling()
    host.keep_freed_memory()
    device = devices.claim(backend, local_rank, local_size)
    patience = timedelta(seconds=timeout)
    try:
        arguments, _served = meet(meeting, listener, rank, size, patience)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=patience, device_id=device, **arguments)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        first_line = str(error).splitlines()[0]
        where = f"{meeting.host}:{meeting.port}" if meeting.port else meeting.init_method
        raise NeverMet(
            f"rank {rank} of {size} waited {timeout:g} s at {where} and did not meet all the others ({first_line})"
        ) from error
    result = before_leaving(fn(rank, size, *args))
    dist.destroy_process_group()
    return result
