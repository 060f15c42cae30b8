"""Hello: N processes become one world, and each learns who it is.

    python lesson.py
    torchrun --nproc-per-node 4 lesson.py
    python -m playground hello -n 4

Terms: the *world size* is the number of processes, a *rank* is a process's number in it, 0 … N-1.
The *backend* moves the data (gloo on CPU, nccl on GPUs). A *process group* is the set of ranks that
talk; at first there is one, the world. The *master* is the place where the ranks find each other.
On several hosts the *local rank* counts within a host: rank = node rank x ranks per node + local
rank. Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

Function = Callable[[int, int], object]


def start_processes(size: int, fn: Function, backend: str = "gloo") -> None:
    """Start `size` processes, each of which joins one world and calls `fn(rank, size)`, and wait
    for all.

    Raises `RuntimeError` if one of them fails. Its peers may wait for it until their timeout.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:  # 29500 may be taken
        port = server.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # the processes inherit them
    context = mp.get_context("spawn")
    processes = []
    for rank in range(size):
        args = (rank, size, fn, backend)
        processes.append(context.Process(target=init_process, args=args, daemon=True))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        raise RuntimeError(f"ranks that failed: {failed}")


def init_process(rank: int, size: int, fn: Function, backend: str = "gloo") -> None:
    """Join the world that meets at MASTER_ADDR and MASTER_PORT, call `fn(rank, size)`, leave."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(backend, rank=rank, world_size=size)
    dist.barrier()  # a rank that leaves while others still connect to it makes them fail
    fn(rank, size)
    dist.destroy_process_group()


def who_am_i(rank: int, size: int) -> dict[str, object]:
    """What a rank knows about itself. `heard_from` is the proof that the world is one: all ranks it
    met."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, rank)
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "local_rank": dist.get_node_local_rank(0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "backend": dist.get_backend(),
        "heard_from": everyone,
    }


def where_am_i(rank: int, size: int) -> dict[str, object]:
    """Where each rank runs, if all nodes have as many: rank = node rank x ranks per node + local
    rank.

    A script for `mp.spawn(main_worker, nprocs=ngpus)` works out its rank like this; here every
    process is told its local rank.
    """
    local_ranks: list[Any] = [None] * size
    dist.all_gather_object(local_ranks, dist.get_node_local_rank(rank))
    per_node = max(local_ranks) + 1
    node_rank, local_rank = divmod(rank, per_node)
    total = node_rank * per_node + local_rank
    if local_ranks != [other % per_node for other in range(size)]:
        return {
            "local_rank": local_ranks[rank],
            "rank_as_a_sum": "nodes have different numbers of ranks",
        }
    return {
        "node_rank": node_rank,
        "ranks_per_node": per_node,
        "local_rank": local_rank,
        "rank_as_a_sum": f"{node_rank} x {per_node} + {local_rank} = {total}",
    }


def print_steps(rank: int, world_size: int) -> None:
    """Print who this rank has heard from, and its place."""
    heard_from = who_am_i(rank, world_size)["heard_from"]
    place = where_am_i(rank, world_size)["rank_as_a_sum"]
    print(f"Rank {rank} of {world_size} has heard from {heard_from}: {place}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process
        init_process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), print_steps)
    else:
        start_processes(4, print_steps)
