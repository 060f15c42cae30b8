"""Why the path goes on to processes: what DataParallel costs that processes do not.

    python -m playground data-parallel

The model is copied to every device at every step, and threads take turns at the GIL. Here are the same steps and the
same work both ways: `copying` and `threads` run in one process, `averaging` and `processes` on one rank per device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.algorithms import load_all_reduce
from playground.algorithms.messages import Messages, observed
from playground.algorithms.transport import Addressed
from playground.lessons.data_parallel.lesson import parallel_apply, replicate
from playground.lessons.data_parallel.losses import LENGTH, gather_losses, new_model_and_batch, new_step
from playground.lessons.data_parallel.machine import resolve_devices
from playground.lessons.data_parallel.memory import track_memory
from playground.lessons.data_parallel.page import Averaging, Copying, DataParallelSettings, DeviceTraffic, WorkSeconds
from playground.measurement.interleave import interleave, timed
from playground.runtime import device
from playground.training.partition import share
from playground.training.sync import GradSync, new_grad_sync

ROUNDS = 5
"""Timed calls of each piece of work."""


def copying(rank: int, size: int, settings: DataParallelSettings) -> Copying:
    """Steps of DataParallel, the loss inside forward: every device gets the model, one gets all gradients."""
    devices = resolve_devices(settings.devices)
    model, tokens, targets = new_model_and_batch(settings.batch_size, settings.seed, devices[0])
    step = new_step(model, partial(gather_losses, model, tokens, targets, devices, devices[0]), GradSync(model))
    with track_memory(devices) as account:
        account.put_module(model, devices[0])
        step()
    moves = [move for move in account.moves if move.part in ("replicate", "reduce")]
    [seconds] = median_seconds([step], devices, settings.steps)
    traffic = [
        DeviceTraffic(
            device=str(each),
            sent=sum(move.bytes for move in moves if move.source == each),
            received=sum(move.bytes for move in moves if move.target == each),
        )
        for each in devices
    ]
    return Copying(seconds=seconds, devices=traffic)


def averaging(rank: int, size: int, settings: DataParallelSettings) -> Averaging:
    """The same steps as sgd takes them: every rank keeps its replica, and gradients are averaged."""
    batch_size = settings.batch_size
    model, tokens, targets = new_model_and_batch(batch_size, settings.seed, device())
    first = sum(share(batch_size, other, size) for other in range(rank))
    mine = slice(first, first + share(batch_size, rank, size))
    tokens, targets = tokens[mine].to(device()), targets[mine].to(device())

    def part_of_mean_loss() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss * size / (batch_size * LENGTH)

    def step_by(all_reduce: str) -> Callable[[], torch.Tensor]:
        return new_step(model, part_of_mean_loss, new_grad_sync("flat", model, load_all_reduce(all_reduce)))

    sent = 0

    def count(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        nonlocal sent
        sent += sum(part.nbytes for part, _ in send)

    with observed(count):
        step_by("ring")()
    [seconds] = median_seconds([step_by("backend")], [device()], settings.steps)
    return Averaging(seconds=seconds, sent=sent)


def threads(rank: int, size: int, settings: DataParallelSettings) -> dict[str, WorkSeconds]:
    """Work on one device, then as much on each at once: by threads, and by processes."""
    torch.set_num_threads(1)
    devices, results = resolve_devices(settings.devices), {}
    for name, (model, inputs) in new_work(devices[0]).items():
        replicas = replicate(model, devices)
        chunks = [(inputs.to(each),) for each in devices]
        alone, together = median_seconds(
            [
                partial(parallel_apply, replicas[:1], chunks[:1], None, devices[:1]),
                partial(parallel_apply, replicas, chunks, None, devices),
            ],
            devices,
        )
        results[name] = WorkSeconds(alone=alone, together=together)
    return results


def processes(rank: int, size: int) -> dict[str, WorkSeconds]:
    """The same by processes: on rank 0 while the others wait, then on every rank at once."""
    torch.set_num_threads(1)
    results = {}
    for name, (model, inputs) in new_work(device()).items():
        work = partial(model, inputs)
        calls = [work if rank == 0 else do_nothing, partial(work_together, work)]
        alone, together = median_seconds(calls, [device()])
        results[name] = WorkSeconds(alone=alone if rank == 0 else 0.0, together=together)
    return results


def do_nothing() -> None:
    """Keep a rank alive while another one works."""


def work_together(work: Callable[[], object]) -> None:
    """Done when every rank is."""
    work()
    dist.barrier()


def new_work(place: torch.device) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Two loads of some 5 to 30 ms: one mostly Python, which holds the GIL, one mostly arithmetic."""
    small = nn.Sequential(*[nn.Linear(8, 8)] * 1000)
    large = nn.Sequential(*[nn.Linear(1024, 1024)] * 4)
    return {
        "many small operations": (small.requires_grad_(False).to(place), torch.zeros(4, 8, device=place)),
        "few large operations": (large.requires_grad_(False).to(place), torch.zeros(256, 1024, device=place)),
    }


def median_seconds(
    calls: Sequence[Callable[[], object]], devices: Sequence[torch.device], rounds: int = ROUNDS
) -> list[float]:
    """What each call takes, the median of `rounds`, after one that is not counted. All ranks must call this."""
    for call in calls:
        call()
    turns = interleave([timed(call, devices=devices) for call in calls], range(rounds), Random(0))
    return [median(seconds) for seconds in turns]
