"""A training that saves its state and resumes from it: killed, it continues where it was.

    torchrun --nproc-per-node 2 --max-restarts 3 lesson.py FOLDER
    python -m playground elastic
    python -m playground elastic --kills 10 --seed 7 --way ddp

The training is sgd's. When a rank is gone, the others cannot continue: torchrun ends them and
starts as many new ones. These resume from the newest snapshot, and the end has the same bits as
without the failure. The snapshot is one file for all ranks, whole or absent:

    {"epoch": 1, "step": 40, "model": …, "optimizer": …,
     "own": [{"totals": …, "rng": …}, …]}

`own` has an entry for each rank. Who gets which sample is not stored: it follows from the seed, the
epoch and the step. FOLDER holds MNIST as torchvision stores it. With `FOLDER snapshot.pt 47`, that
file holds the snapshot, and a rank is killed after step 47.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from playground.lessons.mnist import Net
from playground.lessons.partition import (
    broadcast_parameters,
    count,
    load_mnist,
    partition_dataset,
    print_epoch,
)
from playground.lessons.sgd.lesson import average_gradients


def write(file: Path, state: object) -> None:
    """Save `state` in `file`. Whenever the process is killed or the power fails, the file holds all
    of it, or all that it held before."""
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())  # the content is on the disk before it gets its name
    os.replace(part, file)


def save(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, step: int,
    own: object,
) -> None:  # fmt: skip
    """Write what is the same on all ranks, and what each has of its own. All must call this."""
    owns = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, owns)
    if owns:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        write(file, {"epoch": epoch, "step": step, **state, "own": owns})


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int, Any]:
    """Restore model and optimizer. Returns the epoch, how many of its steps are done, and what is
    this rank's own; 1, 0 and None if there is no file.

    Raises `ValueError` if a different number of ranks took the snapshot.
    """
    if not file.exists():
        return 1, 0, None
    state = torch.load(file, map_location="cpu", weights_only=True)
    before, size = len(state["own"]), dist.get_world_size()
    if before != size:
        raise ValueError(f"{before} ranks took the snapshot {file}, and {size} are to resume")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["step"], state["own"][dist.get_rank()]


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor,
    samples: float,
) -> torch.Tensor:  # fmt: skip
    """sgd's step, where a rank has `samples` of the global batch on average. Returns its counts."""
    optimizer.zero_grad()
    output = model(images)
    loss = F.nll_loss(output, labels, reduction="sum")
    (loss / samples).backward()
    average_gradients(model)
    optimizer.step()
    return count(loss, output, labels)


def print_resumed(step: int) -> None:
    if dist.get_rank() == 0:
        print(f"Resumed after step {step}", flush=True)


def run(
    rank: int, size: int, data: Any, file: Path, every: int = 20, batch_size: int = 128,
    epochs: int = 10, lr: float = 0.01, momentum: float = 0.5, seed: int = 1234,
    loader: Any = DataLoader, rng: Any = torch,
    after_resume: Callable[[int], object] = print_resumed,
    after_step: Callable[[int], object] = lambda step: None,
    after_epoch: Callable[..., object] = print_epoch,
) -> nn.Module:  # fmt: skip
    """Train `Net` on this rank's part of `data`, from the snapshot in `file` on, and return it.

    One is taken every `every` steps, and at the end. `rng`: torch, or torch.cuda on a GPU.
    """
    torch.manual_seed(seed)
    train_set, _ = partition_dataset(data, batch_size, seed, loader)
    model = Net().to(memory_format=torch.channels_last)
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    torch.manual_seed(seed + 1 + rank)  # from here on, each rank draws different dropout masks
    first, done, own = load(file, model, optimizer)
    for _ in range(first - 1):
        next(iter(train_set.sampler))  # draws the order of an epoch that is over
    for epoch in range(first, epochs + 1):
        model.train()
        totals = torch.zeros(3, dtype=torch.float64)
        before = (epoch - 1) * len(train_set)
        batches = iter(train_set)
        if done:
            for _ in range(done):
                next(batches)
            totals.copy_(own["totals"])
            rng.set_rng_state(own["rng"])  # not earlier: the loader, too, has drawn some
            after_resume(before + done)
        for step, (images, labels) in enumerate(batches, done + 1):
            samples = min(batch_size, len(data) - (step - 1) * batch_size)
            totals += take_step(model, optimizer, images, labels, samples / size)
            after_step(before + step)
            if (before + step) % every == 0 or before + step == epochs * len(train_set):
                own = {"totals": totals.cpu(), "rng": rng.get_rng_state()}
                save(file, model, optimizer, epoch, step, own)
        done = 0
        after_epoch(epoch, model, totals)
    return model


def die_after(last: int, step: int) -> None:
    """In the first start, the last rank is killed after step `last`, without any warning."""
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first_start and step == last and dist.get_rank() == dist.get_world_size() - 1:
        print(f"Rank {dist.get_rank()} is killed after step {step}", flush=True)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = load_mnist(sys.argv[1] if sys.argv[1:] else "data")
    file = Path(sys.argv[2] if sys.argv[2:] else "snapshot.pt")
    last = int(sys.argv[3] if sys.argv[3:] else 0)
    run(dist.get_rank(), dist.get_world_size(), data, file, after_step=partial(die_after, last))
    dist.destroy_process_group()
