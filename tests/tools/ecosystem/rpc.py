import os

import torch
import torch.distributed.rpc as rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0:
    there = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
    print(f"{there.to_here().tolist()} {rpc.rpc_sync('worker1', max, args=(3, 4))}\n", end="")
rpc.shutdown()
