import torch
from common import dist, new_model, rank, say, sgd, size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

model, mesh = new_model(), init_device_mesh("cpu", (size,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
optimizer = sgd(model)
torch.manual_seed(rank)
for step in range(4):
    model.set_requires_gradient_sync(step % 2 == 1)
    loss = model(torch.randn(6, 8)).float().square().mean()
    loss.backward()
    if step % 2:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        say(loss.detach(), norm.full_tensor())
dist.destroy_process_group()
