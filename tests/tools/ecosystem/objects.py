import torch
from common import dist, rank, say, size

dist.monitored_barrier()
gathered, received = [None] * size, [None]
dist.all_gather_object(gathered, {"rank": rank})
dist.gather_object({"a": rank}, parts := [None] * size if rank == 0 else None)
dist.scatter_object_list(
    received, [{"number": each} for each in range(size)] if rank == 0 else None
)
dist.broadcast_object_list(shared := ["all", rank] if rank == 0 else [None, None])
if rank == 1:
    dist.send_object_list(["from", 1], dst=0)
if rank == 0:
    dist.recv_object_list(message := [None, None], src=1)
    say(message[1], len(parts))
dist.all_reduce(one := torch.ones(1))
say(one, len(gathered), received[0]["number"], shared[1])
dist.destroy_process_group()
