import torch
from common import dist, rank, say, size

alone = dist.new_group([0])
mine, _ = dist.new_subgroups_by_enumeration([[each] for each in range(size)])
again = dist.new_group(backend="gloo", group_desc="the same ranks")
all_but_first = dist.new_group(range(1, size), use_local_synchronization=True)
one = torch.full((1,), rank + 1.0)
dist.all_reduce(one, group=mine)
dist.all_reduce(one, group=again)
if rank:
    dist.all_reduce(one, group=all_but_first)
else:
    dist.barrier(alone)
say(one, dist.get_group_rank(mine, rank), dist.get_process_group_ranks(mine)[0])
dist.destroy_process_group(again)
dist.destroy_process_group()
