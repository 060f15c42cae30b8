import torch
from common import dist, say, size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

model = nn.ModuleDict(
    {
        "norm": nn.LayerNorm(8),
        "up": nn.Linear(8, 16),
        "down": nn.Linear(16, 8),
        "head": nn.Linear(8, 4),
    }
)
mesh = init_device_mesh("cpu", (size,))
gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
parallelize_module(model["up"], mesh, gather)
plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Replicate()),
    "down": RowwiseParallel(output_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
parallelize_module(model, mesh, plan)
x = torch.randn(2, 4 * size, 8).chunk(size, 1)[dist.get_rank()]
logits = model["head"](model["down"](model["up"](model["norm"](x)).relu()))
with loss_parallel():
    targets = torch.zeros(2 * 4 * size, dtype=torch.long)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets)
    loss.backward()
say(loss.full_tensor().detach(), model["up"].weight.grad.full_tensor().norm())
dist.destroy_process_group()
