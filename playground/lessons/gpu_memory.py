"""The memory of a training step, moment by moment: see gpus.md."""

import os

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, SAMPLES = 8, 512, 4096  # samples of each rank
MIB = 2**20


def print_memory(moment):
    if dist.get_rank() == 0:
        print(f"{moment:12} {torch.cuda.memory_allocated() / MIB:6.1f} MiB")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    torch.manual_seed(1234)  # all ranks begin with the same parameters
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.extend([nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()])
    model.cuda()
    print_memory("parameters")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(SAMPLES, WIDTH, device="cuda")
    print_memory("inputs")
    for _ in range(2):
        loss = model(inputs).square().mean()
        print_memory("forward")
        loss.backward()
        print_memory("backward")
        for param in model.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        print_memory("step")
        optimizer.zero_grad()
        print_memory("zero_grad")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
