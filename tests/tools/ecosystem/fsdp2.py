import torch
from common import dist, new_model, say, size, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model, mesh = new_model(), init_device_mesh("cpu", (size,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
say(train(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
dist.destroy_process_group()
