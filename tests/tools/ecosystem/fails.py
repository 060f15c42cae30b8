from common import dist, rank, say

say(1)
dist.barrier()
if rank == 1:
    raise ValueError("always")
dist.destroy_process_group()
