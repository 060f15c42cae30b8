import torch
from common import dist, new_model, say, sgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(new_model(), mesh["tp"], plan)
fully_shard(model, mesh=mesh["dp"])
torch.manual_seed(mesh["dp"].get_local_rank())
optimizer = sgd(model)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
say(loss.detach(), *mesh.get_coordinate())
dist.destroy_process_group()
