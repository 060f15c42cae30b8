"""DataParallel by its parts: one process drives all devices, with a thread for each.

    python -m playground data-parallel
    python -m playground data-parallel --devices cpu:0,cpu:1 --gather logits --plot memory.svg
    python -m playground data-parallel --train --limit 6000

Without GPUs the devices are virtual ones, `cpu:0` and on: each with its own thread and its own account of memory, and
what moves between them is copied. On GPUs the same code runs on the real ones: --devices cuda:0,cuda:1. (One process
drives them all, so what --world-size and --backend say to other lessons, --devices says here.)
The parts themselves: playground/data_parallel/. What they cost against processes: data_parallel_limits.py, beside this.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html and
https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch import nn

from playground.data_parallel import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    watched,
    weighted_mean,
)
from playground.data_parallel.devices import known
from playground.data_parallel.language import TokenLoss, loss_by, optimizer_of, task, train_step
from playground.data_parallel.memory import HOST
from playground.data_parallel.moves import copied
from playground.runtime import report
from playground.training.data import Images, partition_dataset, partition_test_set
from playground.training.loop import train
from playground.training.net import Net
from playground.training.settings import Settings


def split(rank: int, size: int, devices: list[str]) -> list[dict[str, Any]]:
    """What a model sees of 30 inputs on 1, 2 and 3 devices, as each replica itself notes it; and of only 2 inputs.

    | device | 30 on 1 | 30 on 2 | 30 on 3 | 2 on 3 |
    |--------|---------|---------|---------|--------|
    | cpu:0  | 30      | 15      | 10      | 1      |
    | cpu:1  | 0       | 15      | 10      | 1      |
    | cpu:2  | 0       | 0       | 10      | 0      |
    """
    most = min(3, len(devices))
    seen: dict[int, int] = {}

    class Noting(nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            seen[int(numbers[0])] = len(numbers)
            return numbers

    rows: list[dict[str, Any]] = [{"device": device} for device in devices[:most]]
    for batch, many in [*((30, many) for many in range(1, most + 1)), (2, most)]:
        seen.clear()
        data_parallel(Noting(), torch.arange(batch), devices[:many])
        sizes = [length for _, length in sorted(seen.items())]
        for row, length in zip(rows, sizes + [0] * most, strict=False):
            row[f"{batch} on {many}"] = length
    return rows


def one_step(rank: int, size: int, devices: list[str], output: str, batch_size: int) -> list[dict[str, Any]]:
    """One training step: what each part of it moved from where to where, and what every device holds after it.

    For each device {device, held: {part: bytes}, received: [{part, from, bytes}]}.
    """
    places, target = known(devices), torch.device(output)
    model, tokens, targets = task(batch_size, places[0])
    with watched(places) as account:
        optimizer = optimizer_of(model, account, places[0])
        held = {"(before)": account.held}
        chunks = scatter((tokens,), places)
        held["scatter"], used = account.held, places[: len(chunks)]
        replicas = replicate(model, used)
        held["replicate"] = account.held
        outputs = parallel_apply(replicas, chunks, None, used)
        held["parallel_apply"] = account.held
        logits = gather(outputs, target)
        held["gather"] = account.held
        loss = TokenLoss()(logits, copied("loss", targets, target))
        held["loss"] = account.held
        loss.backward()
        del replicas, chunks, outputs, logits, loss
        held["backward"] = account.held
        optimizer.step()
        held["optimizer.step"] = account.held
    moved: Counter[tuple[str, torch.device, torch.device]] = Counter()
    for move in account.moves:
        moved[move.part, move.source, move.target] += move.bytes
    return [
        {
            "device": str(place),
            "held": {part: bytes_held[place] for part, bytes_held in held.items()},
            "received": [
                {"part": part, "from": "host" if source == HOST else str(source), "bytes": count}
                for (part, source, there), count in moved.items()
                if there == place
            ],
        }
        for place in places
    ]


def ways(
    rank: int, size: int, devices: list[str], asked: list[tuple[str, str]], batch_size: int, steps: int
) -> list[dict[str, Any]]:
    """What fills a device, and the cures: logits gathered on one device, or on another; the loss inside forward;
    outputs that stay where they are, with the criterion in parallel.

    `asked` are pairs of a way and an output device. For each {gather, output_device, loss, gathered: bytes that
    gather moved, seconds: of a step, median, devices: [{device, peak: bytes}]}.
    """
    places = known(devices)
    model, tokens, targets = task(batch_size, places[0])
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rows, steps_of = [], []
    for way, output in asked:
        model.load_state_dict(start)
        loss_of = loss_by(way, places, torch.device(output))
        with watched(places) as account:
            loss = train_step(loss_of, model, tokens, targets, optimizer_of(model, account, places[0]))
        rows.append(
            {
                "gather": way, "output_device": output, "loss": loss,
                "gathered": sum(move.bytes for move in account.moves if move.part == "gather"),
                "devices": [{"device": str(place), "peak": account.peak[place]} for place in places],
            }
        )  # fmt: skip
        steps_of.append((loss_of, model, tokens, targets, optimizer_of(model)))
    times: list[list[float]] = [[] for _ in asked]
    for _ in range(steps):  # in turn: what else the machine does hits all alike
        for step, seconds in zip(steps_of, times, strict=True):
            started = time.perf_counter()
            train_step(*step)
            seconds.append(time.perf_counter() - started)
        report(step="ways")
    return [row | {"seconds": median(seconds)} for row, seconds in zip(rows, times, strict=True)]


def two_means(rank: int, size: int, devices: list[str]) -> list[dict[str, Any]]:
    """The mean of the devices' mean losses is the mean over all samples only if all chunks are of one size; weighted
    by the sizes it always is.

    For two batches, with losses 1, 2, 3, …: {samples, chunks, means, mean, mean of means, weighted mean}.
    """
    places, rows = known(devices), []
    for samples in (3 * len(places), 3 * len(places) - 1):
        losses = torch.arange(1, samples + 1, dtype=torch.float64)
        chunks = scatter(losses, places)
        sizes = [len(chunk) for chunk in chunks]
        means = gather([chunk.mean() for chunk in chunks], places[0])
        rows.append(
            {
                "samples": samples, "chunks": sizes, "means": means.tolist(), "mean": losses.mean().item(),
                "mean of means": means.mean().item(), "weighted mean": weighted_mean(means, sizes).item(),
            }
        )  # fmt: skip
    return rows


class NetWithoutDropout(Net):
    """Net as it is in evaluation. Threads draw their dropout masks from one generator, in an order that is left to
    chance: with dropout no two runs would be the same, and none the same as on one device."""

    def train(self, mode: bool = True) -> NetWithoutDropout:
        super().train(False)
        return self


def run(rank: int, size: int, settings: Settings, devices: list[str]) -> dict[str, Any]:
    """Train as sgd does, in one process, each batch on all devices; see `train` for what it returns."""
    torch.manual_seed(settings.seed)
    train_set = partition_dataset(Images(settings.folder, "train", settings.limit), settings.batch_size, settings.seed)
    test_set = partition_test_set(Images(settings.folder, "t10k"))
    model = NetWithoutDropout().to(known(devices)[0], memory_format=torch.channels_last)
    return train(DataParallel(model, devices), train_set, test_set, settings, tell=report)
