import torch
from common import dist, new_model, say, size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

mesh = init_device_mesh("cpu", (size,))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(new_model(), mesh, plan)
torch.manual_seed(0)
loss = model(torch.randn(6, 8)).square().mean()
loss.backward()
sharded = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
say(loss.detach(), model[0].weight.grad.full_tensor().norm())
say((sharded @ sharded.T).full_tensor().sum())
dist.destroy_process_group()
