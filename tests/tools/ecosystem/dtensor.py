import torch
from common import dist, rank, say, size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

mesh = init_device_mesh("cpu", (size,))
rows = distribute_tensor(torch.arange(30.0).reshape(6, 5), mesh, [Shard(0)])
columns = rows.redistribute(mesh, [Shard(1)])
partial = DTensor.from_local(torch.full((2,), rank + 1.0), mesh, [Partial()])
say(rows.to_local().sum(), columns.to_local().sum(), partial.full_tensor().sum())
say((rows.softmax(1) * columns).mean().full_tensor(), zeros(6, device_mesh=mesh).to_local().numel())
say(partial.redistribute(mesh, [Replicate()]).to_local().sum())
dist.destroy_process_group()
