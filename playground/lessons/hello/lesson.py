"""Hello: N processes become one world, and each learns who it is.

Terms: the *world size* is the number of processes, a *rank* is a process's number in it, 0 … N-1. The *backend* moves
the data (gloo on CPU, nccl on GPUs). A *process group* is the set of ranks that talk; at first there is one, the
world. The *master* is the place where the ranks find each other. On several hosts the *local rank* counts within a
host: rank = node rank x ranks per node + local rank.
The tutorial's `init_process(rank, size, fn)` and its processes come first. What starts the ranks of every command does
the same, and sees to ports, failures and whoever never comes: playground/runtime.

    python -m playground hello -n 4
    torchrun --nproc-per-node 4 -m playground hello
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from playground.runtime import device
from playground.runtime.backends import backend_of


def start_processes(size: int, fn: Callable[[int, int], object], backend: str = "gloo") -> None:
    """Start `size` processes, each of which joins one world and calls `fn(rank, size)`, and wait until all have ended.

    Raises `RuntimeError` if one of them fails. Its peers may wait for it until their timeout: `launch` ends them.
    Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
    """
    with socket.create_server(("127.0.0.1", 0)) as server:  # 29500 may be taken
        port = server.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # the processes inherit them
    context = mp.get_context("spawn")
    args = [(rank, size, fn, backend) for rank in range(size)]
    processes = [context.Process(target=init_process, args=each, daemon=True) for each in args]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
        raise RuntimeError(f"ranks that failed: {failed}")


def init_process(rank: int, size: int, fn: Callable[[int, int], object], backend: str = "gloo") -> None:
    """Join the world that meets at MASTER_ADDR and MASTER_PORT as `rank` of `size`, call `fn(rank, size)`, leave."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(backend, rank=rank, world_size=size)
    dist.barrier()  # a rank that leaves while others still connect to it makes them fail
    fn(rank, size)
    dist.destroy_process_group()


def who_am_i(rank: int, size: int) -> dict[str, object]:
    """Everything a rank knows about itself. `heard_from` is the proof that the world is one: all ranks it met.

    `implementation` is the class behind the backend's name (for nccl, torch has two); `ranks_there` says how many ranks
    share this rank's hardware: the GPU, or the CPUs of its host.
    """
    backend = backend_of()
    mine = (socket.gethostname(), backend.hardware())
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (rank, mine))
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": dist.get_node_local_rank(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device()),
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "torch": str(torch.__version__),  # plain data: torch has a class of its own for this
        "implementation": backend.implementation(),
        **backend.libraries(),
        "hardware": backend.hardware() or "CPU",
        "ranks_there": sum(there == mine for _, there in everyone),
        "heard_from": [other for other, _ in everyone],
    }


def where_am_i(rank: int, size: int) -> dict[str, object]:
    """Where each rank runs: rank = node rank x ranks per node + local rank.

    A script for `mp.spawn(main_worker, nprocs=ngpus)` works out its rank like this; here every process is told. A node
    begins where the local rank is 0; nodes with different numbers of ranks are added up one by one.
    """
    local_ranks: list[Any] = [None] * size
    dist.all_gather_object(local_ranks, dist.get_node_local_rank())
    starts = [0, *(other for other in range(1, size) if local_ranks[other] == 0)]
    per_node = [end - start for start, end in pairwise([*starts, size])]
    node_rank, local_rank = bisect_right(starts, rank) - 1, local_ranks[rank]
    first = starts[node_rank]
    before = f"{node_rank} x {per_node[0]}" if len(set(per_node)) == 1 else str(first)
    return {
        "node_rank": node_rank,
        "ranks_per_node": per_node[node_rank],
        "local_rank": local_rank,
        "rank_as_a_sum": f"{before} + {local_rank} = {first + local_rank}",
    }
