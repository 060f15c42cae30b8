import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(index, rank, file):
    os.environ.update(RANK=str(index), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=2)
    one = torch.full((1,), rank + 1.0)
    dist.all_reduce(one)
    print(f"{rank}.{index} {one.item()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    mp.spawn(worker, (rank, f"{os.getcwd()}/store{rank}"), nprocs=2)
    code = "import os, sys; print(os.environ['RANK'], sys.argv[1:]); sys.exit(3)"
    ran = subprocess.run([sys.executable, "-c", code, "word"], check=False)
    with open(f"code{rank}-{ran.returncode}", "w") as file:
        file.write("3")
    if os.fork() == 0:
        print(f"{rank} a fork\n", end="", flush=True)
        os._exit(0)
    os.wait()
