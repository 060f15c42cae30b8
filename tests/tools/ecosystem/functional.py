import torch
import torch.distributed.nn.functional as differentiable
from common import dist, rank, say, size

x = torch.arange(float(2 * size), requires_grad=True)
parts = differentiable.all_gather(x * (rank + 1))
scattered = differentiable.reduce_scatter(
    torch.empty(2), list(torch.stack(parts).sum(0).chunk(size))
)
loss = scattered.square().sum() + differentiable.all_reduce(x.sum())
loss.backward()
say(loss.detach(), x.grad.sum(), x.grad.norm())
dist.destroy_process_group()
