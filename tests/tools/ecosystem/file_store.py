import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.getcwd()}/store",
    rank=rank,
    world_size=size,
    timeout=timedelta(seconds=60),
)
one = torch.ones(1)
dist.all_reduce(one)
print(f"{rank} {one.item()} {dist.get_backend()}\n", end="", flush=True)
dist.destroy_process_group()
