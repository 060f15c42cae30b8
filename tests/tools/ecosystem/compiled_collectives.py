import torch
from common import dist, new_model, rank, say, sgd, size, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@torch.compile(backend="aot_eager", fullgraph=True)
def average(x):
    total = torch.distributed.nn.functional.all_reduce(x * 2)
    return total / size


x = torch.full((3,), rank + 1.0, requires_grad=True)
say(average(x).sum().detach())
model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (size,)))
model = torch.compile(model, backend="aot_eager")
say(train(model, sgd(model)))
dist.destroy_process_group()
