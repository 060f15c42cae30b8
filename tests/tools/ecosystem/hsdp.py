from common import dist, new_model, say, sgd, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model, mesh = new_model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh)
say(train(model, sgd(model)), mesh["shard"].get_local_rank(), mesh.get_group("replicate").size())
dist.destroy_process_group()
