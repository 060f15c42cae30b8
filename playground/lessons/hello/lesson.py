"""Hello: N processes become one world, and each learns its rank, a number from 0 to N - 1.

world size = N, ranks = 0, 1, …, N - 1

A *process group* is a set of ranks that talk to each other. The first one is the world: all ranks.
The *master* is the address where they meet. A *store* listens there, a table of keys and values:
torchrun runs it, or rank 0 if torchrun has not started the ranks. `python lesson.py` starts four
ranks itself.

    python -m playground hello
    torchrun --nproc-per-node 4 lesson.py

    Process 9523 has RANK=0 LOCAL_RANK=0 WORLD_SIZE=4
    …
    Process 9523 meets the others at MASTER_ADDR=127.0.0.1 MASTER_PORT=41325
    …
    Rank 0 of 4 has read the process ids [9523, 9525, 9527, 9529] in the store
    …
    Rank 0 of 4 has gathered the process ids [9523, 9525, 9527, 9529]
    …
    Rank 0: largest difference between the two lists 0

Source: https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist


def start_processes(size):
    """Start this file once for each rank, and wait for all of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # 0: the system chooses a free port
        port = server.getsockname()[1]  # free again after this block: rank 0 runs the store there
    processes = []
    for rank in range(size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, __file__]
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
    exit_codes = [process.wait() for process in processes]
    if any(exit_codes):
        sys.exit(f"the exit codes of the ranks are {exit_codes}")


def print_environment():
    """Print what this process was told by the program that started it."""
    numbers = [f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    master = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT")]
    print(f"Process {os.getpid()} has", *numbers)
    print(f"Process {os.getpid()} meets the others at", *master)


def gather_by_hand(rank, size, pid):
    """Write this rank's process id to the store, and read the process ids of all ranks.

    store.get waits until the key is there, for at most 30 seconds, and returns bytes.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=30))  # connect to the store
    store.set(f"pid of rank {rank}", str(pid))
    return [int(store.get(f"pid of rank {other}")) for other in range(size)]


def gather_by_torch(size, pid):
    """Get the process ids of all ranks by torch's own call. Every rank must make it."""
    pids = [0] * size
    dist.all_gather_object(pids, pid)
    return pids


def run(rank, size):
    """Collect the process ids of all ranks in both ways, and compare them."""
    pid = os.getpid()
    read = gather_by_hand(rank, size, pid)
    print(f"Rank {rank} of {size} has read the process ids {read} in the store")
    gathered = gather_by_torch(size, pid)
    print(f"Rank {rank} of {size} has gathered the process ids {gathered}")
    difference = max(abs(a - b) for a, b in zip(read, gathered, strict=True))
    print(f"Rank {rank}: largest difference between the two lists {difference}")
    assert difference == 0, "the store and torch have collected different process ids"


if __name__ == "__main__":
    if "RANK" not in os.environ:  # no other program has started the ranks
        start_processes(4)
    else:
        print_environment()
        dist.init_process_group("gloo")
        run(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
