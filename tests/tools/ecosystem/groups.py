import torch
from common import dist, rank, say, size

alone = dist.new_group([0])
mine, _ = dist.new_subgroups_by_enumeration([[each] for each in range(size)])
all_but_first = dist.new_group(range(1, size), use_local_synchronization=True)
one = torch.full((1,), rank + 1.0)
dist.all_reduce(one, group=mine)
if rank:
    dist.all_reduce(one, group=all_but_first)
else:
    dist.barrier(alone)
say(one, dist.get_group_rank(mine, rank), dist.get_process_group_ranks(mine)[0])
halves = dist.new_group(backend="gloo", group_desc="a second one")
dist.all_reduce(one, group=halves)
dist.destroy_process_group(halves)
dist.destroy_process_group()
for name in ("again", "once more"):
    dist.init_process_group("gloo", group_name=name)
    dist.all_reduce(one)
    say(one)
    dist.destroy_process_group()
