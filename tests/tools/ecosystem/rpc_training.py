import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Server:
    """Holds a layer, and calls a worker back."""

    def __init__(self):
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

    def parameters(self):
        return [rpc.RRef(each) for each in self.layer.parameters()]

    def add_up(self):
        return float(sum(each.detach().double().sum() for each in self.layer.parameters()))


@rpc.functions.async_execution
def add_later(to, x, y):
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() * 2)


dist.init_process_group("gloo")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0:
    server = rpc.remote("worker1", Server)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(), lr=0.1)
    for step in range(3):
        with dist_autograd.context() as context:
            loss = server.rpc_sync().forward(torch.ones(3, 4) * step).square().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
    later = rpc.rpc_sync("worker1", add_later, args=("worker0", torch.ones(1), 2))
    print(
        f"{loss.item():.6f} {server.rpc_sync().add_up():.6f} {later.item()}\n", end="", flush=True
    )
dist.barrier()
rpc.shutdown()
dist.destroy_process_group()
