"""From `average_gradients` to DistributedDataParallel, rung by rung, each measured.

    python -m playground ladder
    python -m playground ladder --model resnet18 --plot ladder.svg
    python -m playground ladder -n 4 --bucket-cap-mb 0.02 --all-reduce ring

All train the same model on the same batches with the same dropout masks. In every round each takes one step, in an
order that changes, so that whatever else the machine does meets all of them. In the same rounds each also averages
gradients without a backward to hide behind, which tells how much of that it hides in its steps.
`--all-reduce` is for the rungs: DistributedDataParallel has the backend's.
The rungs: playground/training/gradients.py and overlap.py. What is measured, and how:
playground/lab/climber.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from playground.lab.climber import DDP, PARTS, Climber
from playground.measure import environment
from playground.runtime import device, report
from playground.runtime.agreement import check_agreed
from playground.training.data import Batch, Images, partition_dataset
from playground.training.net import MODELS
from playground.training.replicas import broadcast_parameters, flat, largest_difference, rank_by_rank
from playground.training.rungs import RUNGS
from playground.training.settings import Settings

WARM_UP = 3
"""Rounds that are trained but not timed: DistributedDataParallel arranges its buckets anew after the first."""
TELL_EVERY = 1.0
"""Seconds between two reports of progress."""


def run(rank: int, size: int, settings: Settings, model: str, steps: int) -> dict[str, Any]:
    """Let every rung, and DistributedDataParallel, train `model` for `steps` steps that are timed, and some before.

    {rungs: [a row for each, see `row`], parts: [{way: {part: seconds, median}} for each rank], environment}
    """
    check_agreed({"model": model, "steps": steps})
    batch_size = settings.batch_size
    samples = len(Images(settings.folder, "train", settings.limit)) // batch_size * batch_size  # all batches alike
    train_set = partition_dataset(Images(settings.folder, "train", samples), batch_size, settings.seed)
    torch.manual_seed(settings.seed)
    start = MODELS[model]().to(device(), memory_format=torch.channels_last)
    broadcast_parameters(start)
    rounds = WARM_UP + steps
    climbers = contestants(start, settings, rounds)
    seconds = race(climbers, endless(train_set), rounds, settings)[:, :, WARM_UP:]
    rows = [row(climber, seconds[:, number], climbers[-1]) for number, climber in enumerate(climbers)]
    for each in rows:
        each |= {"speed_to_first": rows[0]["p50"] / each["p50"], "speed_to_ddp": rows[-1]["p50"] / each["p50"]}
    return {"rungs": rows, "parts": by_rank(climbers, seconds), "environment": environment.describe()}


def contestants(start: nn.Module, settings: Settings, rounds: int) -> list[Climber]:
    """The rungs in order, and DistributedDataParallel."""
    climbers = []
    for way in (*RUNGS, DDP):
        report(step=0, steps=rounds)
        climbers.append(Climber(way, start, settings))
    return climbers


def by_rank(climbers: Sequence[Climber], seconds: torch.Tensor) -> list[dict[str, dict[str, float]]]:
    """For each rank, what the parts of each one's steps took there."""
    medians = seconds[..., : len(PARTS)].quantile(0.5, dim=2).tolist()
    return [
        {climber.way: dict(zip(PARTS, parts, strict=True)) for climber, parts in zip(climbers, mine, strict=True)}
        for mine in medians
    ]


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def race(climbers: Sequence[Climber], batches: Iterator[Batch], rounds: int, settings: Settings) -> torch.Tensor:
    """In every round each takes the same step, and, but for the first, averages alone.

    Seconds [rank, climber, round, `PARTS` and then averaging alone], float64, the same on every rank.
    """
    rank, size, order = dist.get_rank(), dist.get_world_size(), Random(settings.seed)  # the same order on every rank
    turns = [(number, alone) for number in range(len(climbers)) for alone in (False, True)]
    seconds = torch.zeros(len(climbers), rounds, len(PARTS) + 1, dtype=torch.float64)
    told = time.monotonic()
    for step in range(rounds):
        images, labels = (part.to(device()) for part in next(batches))
        for number, alone in order.sample(turns, len(turns)) if step else turns[::2]:
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                report(step=step, steps=rounds)
            if alone:
                seconds[number, step, -1] = climbers[number].average()
                continue
            torch.manual_seed(settings.seed + 1 + step * size + rank)
            parts = climbers[number].step(images, labels, settings.batch_size)
            seconds[number, step, :-1] = torch.tensor(parts, dtype=torch.float64)
    return rank_by_rank(seconds.to(device())).cpu()


def row(climber: Climber, seconds: torch.Tensor, ddp: Climber) -> dict[str, Any]:
    """What one of them came to; all ranks must call this. `seconds` [rank, round, parts] are those of all ranks.

    p50 and p95 are of a step's time on its slowest rank. Its parts are medians too, each step's of the rank that came
    last to the averaging: it waits for messages, and not for slower ranks. So does `alone`, the averaging without
    a backward to hide behind; `hidden` is the share of it that was not exposed. Times in seconds, shares of 1.
    """
    parts, alone = seconds[..., : len(PARTS)], seconds[..., -1].amin(0).quantile(0.5).item()
    p50, p95 = (parts.sum(-1).amax(0).quantile(quantile).item() for quantile in (0.5, 0.95))
    last = parts[..., PARTS.index("exposed")].argmin(0)
    of_last = dict(zip(PARTS, parts[last, range(len(last))].quantile(0.5, dim=0).tolist(), strict=True))
    messages, element = climber.messages, flat(climber.model.parameters()).element_size()
    return {
        "rung": climber.way,
        "p50": p50,
        "p95": p95,
        **of_last,
        "alone": alone,
        "hidden": max(0.0, 1 - of_last["exposed"] / alone) if messages.early else 0.0,
        "messages": len(messages.lengths),
        "bytes": sum(messages.lengths) * element,
        "early_bytes": messages.early * element,
        **outcome(climber, ddp),
    }


def outcome(climber: Climber, ddp: Climber) -> dict[str, float]:
    """The mean loss of the last batch, and how far parameters are from DistributedDataParallel's and between ranks.

    From its they are off by rounding, 1e-8, since sums in another order round otherwise. In many steps rounding now and
    then decides which of two numbers a ReLU or max_pool lets through: 1e-4. (In float64 all agree to 1e-16.)
    """
    difference = (flat(climber.model.parameters()) - flat(ddp.model.parameters())).abs().max().double()
    of_ranks = rank_by_rank(torch.stack([torch.full_like(difference, climber.loss), difference]))
    return {
        "loss": of_ranks[:, 0].sum().item(),
        "difference_to_ddp": of_ranks[:, 1].max().item(),
        "replicas_max_difference": largest_difference(climber.model),
    }
