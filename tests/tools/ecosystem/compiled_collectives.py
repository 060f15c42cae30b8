import torch
from common import dist, new_model, rank, say, sgd, size, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@torch.compile(backend="aot_eager", fullgraph=True)
def average(x):
    total = x * 2
    dist.all_reduce(total)
    return total / size


say(average(torch.full((3,), rank + 1.0)).sum())
model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (size,)))
model = torch.compile(model, backend="aot_eager")
say(train(model, sgd(model)))
dist.destroy_process_group()
