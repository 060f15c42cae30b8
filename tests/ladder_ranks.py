"""What tests of the ladder let ranks do: the same training without it, and the ladder with a broken rung."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.lab.climber import DDP, Climber, future, messages
from playground.lessons import run_training
from playground.training.data import Images, partition_dataset
from playground.training.gradients import ALL_REDUCES, AllReduce
from playground.training.net import MODELS, Net
from playground.training.rungs import RUNGS
from playground.training.settings import Settings
from playground.training.sync import AverageAfterBackward


def by_itself(rank: int, size: int, folder: Path, steps: int, samples: int, batch_size: int, seed: int) -> float:
    """The mean loss of the ladder's last batch, by a loop of its own: no clock, no rungs, no other replica."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    batches = iter(partition_dataset(Images(folder, "train", samples), batch_size, seed))
    for step in range(steps):
        images, labels = next(batches)
        torch.manual_seed(seed + 1 + step * size + rank)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum") / batch_size
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


def forget_the_average(model: torch.nn.Module, all_reduce: AllReduce) -> None:
    """Send everything, and leave every gradient as it was."""
    all_reduce(torch.cat([param.grad.flatten() for param in model.parameters()]))


def with_a_forgetful_rung(rank: int, size: int, folder: Path) -> Any:
    RUNGS["flat"] = lambda model, all_reduce, cap: AverageAfterBackward(forget_the_average, model, all_reduce)
    return run_training(rank, size, "ladder", {"folder": folder, "batch_size": 16}, ("net", 2))["rungs"]


def messages_of_resnet18(rank: int, size: int, ways: list[str]) -> list[Any]:
    start = MODELS["resnet18"]()
    return [astuple(messages(way, start, Settings(folder=Path()))) for way in ways]


def averaging_alone(rank: int, size: int, way: str) -> dict[str, list[int]]:
    """The messages that were counted for a step, and those that averaging without a backward really sends."""
    sent: list[int] = []

    def noting(tensor: torch.Tensor, **how: Any) -> Any:
        sent.append(tensor.numel())
        return dist.all_reduce(tensor, **how)

    ALL_REDUCES["noting"] = noting
    settings = Settings(folder=Path(), all_reduce="noting", bucket_cap=50_000)
    climber = Climber(way, Net(), settings)
    if way == DDP:
        climber.sync.model.register_comm_hook(None, lambda _, bucket: future(noting(bucket.buffer(), async_op=True)))
    climber.step(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64), 2 * size)
    sent.clear()
    climber.average()
    return {"counted": climber.messages.lengths, "sent": sent}


def with_different_steps(rank: int, size: int, folder: Path) -> None:
    run_training(rank, size, "ladder", {"folder": folder, "batch_size": 16}, ("net", 2 + rank))
