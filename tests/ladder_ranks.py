"""What tests of the ladder let ranks do: the same training without it, and the ladder with a broken rung."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from playground.lessons.ladder.lesson import run
from playground.lessons.ladder.messages import Messages, count_messages, future_of
from playground.lessons.ladder.results import LadderResult
from playground.lessons.ladder.settings import DDP, LadderSettings
from playground.lessons.ladder.timed_replica import TimedReplica
from playground.runtime.remote import Remote
from playground.training.data import Images, partition_dataset
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.gradients import AllReduce
from playground.training.models import MODELS
from playground.training.net import Net
from playground.training.settings import BUCKET_CAP


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


def with_a_forgetful_rung(rank: int, size: int, settings: LadderSettings) -> LadderResult:
    forgetful = Remote(forget_the_average.__module__, forget_the_average.__name__)
    GRAD_SYNCS["flat"] = replace(GRAD_SYNCS["flat"], code=forgetful)
    return run(rank, size, settings)


def messages_of_resnet18(rank: int, size: int, names: list[str]) -> list[Messages]:
    start = MODELS["resnet18"].code()
    return [count_messages(name, start, dist.all_reduce, BUCKET_CAP) for name in names]


def averaging_alone(rank: int, size: int, name: str) -> dict[str, list[int]]:
    """The messages that were counted for a step, and those that averaging without a backward really sends."""
    sent: list[int] = []

    def recording(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.numel())
        return dist.all_reduce(tensor, **options)

    settings = LadderSettings(folder=Path(), bucket_cap=50_000)
    counted = count_messages(name, Net(), dist.all_reduce, settings.bucket_cap)
    replica = TimedReplica(name, Net(), recording, settings)
    if name == DDP:
        replica.sync.model.register_comm_hook(
            None, lambda _, bucket: future_of(recording(bucket.buffer(), async_op=True))
        )
    replica.step(torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64), 2)
    sent.clear()
    replica.average_alone()
    return {"counted": counted.lengths, "sent": sent}


def with_different_steps(rank: int, size: int, settings: LadderSettings) -> None:
    run(rank, size, replace(settings, steps=settings.steps + rank))
