"""What the programs of this folder share: a process group, a model, steps, and a line per rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def say(*values):
    """Print numbers in one write, behind the rank."""
    told = " ".join(f"{float(value):.6f}" for value in values)
    print(f"{rank} {told}\n", end="", flush=True)


def new_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def new_ddp(**options):
    return DistributedDataParallel(new_model(), **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps=3):
    """The loss of the last step. Each rank draws samples of its own."""
    torch.manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def total(model):
    return sum(each.detach().double().sum() for each in model.parameters())
