"""A host leaves and another joins: the same training on two ranks, on one, and on two again.

    torchrun --nnodes 1:2 … playground/lessons/elastic/hosts.py snapshot.pt 300

torchrun's agents restart all ranks at each change, and each start resumes from the newest snapshot.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH, SAMPLES = 8, 40_000
"""Samples of a step on all ranks together, and in all."""


def run(
    rank: int, size: int, file: Path, end: int = 100, every: int = 4, pause: float = 0.0
) -> list[tuple[int, float]]:
    """Train from the snapshot in `file` to step `end`. Returns, for each step taken here, its
    number and the loss of the whole batch; every rank returns the same. `size` must divide `BATCH`,
    and `end` be at most SAMPLES / BATCH."""
    torch.manual_seed(1234)
    inputs = torch.randn(SAMPLES, 16)  # the same on every rank, in every start
    order = torch.randperm(SAMPLES)
    targets = inputs.sin().mean(1, keepdim=True)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    first, losses = 1, []
    if file.exists():
        snapshot = torch.load(file)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["step"] + 1
    for step in range(first, end + 1):
        batch = order[(step - 1) * BATCH : step * BATCH]  # the same, whatever the size
        mine = batch[rank::size]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append((step, loss.item() / size))
        if rank == 0 and step % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, file.with_suffix(".part"))
            os.replace(file.with_suffix(".part"), file)  # whole or absent
        if rank == 0 and pause:
            print(f"step {step}, world size {size}: loss {losses[-1][1]:.7f}", flush=True)
        time.sleep(pause)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size(), Path(sys.argv[1]), int(sys.argv[2]), pause=0.2)
    dist.destroy_process_group()
