import os

import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, _, _ = next(dist.rendezvous("env://", rank, size))
store.set(f"key {rank}", "value")
print(f"{store.get(f'key {1 - rank}')}\n", end="")
dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=size)
other = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False)
other.add("count", 1)
dist.barrier()
print(f"{other.add('count', 0)}\n", end="")
dist.barrier()
dist.destroy_process_group()
