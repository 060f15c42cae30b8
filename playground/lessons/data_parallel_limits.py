"""Why the path goes on to processes: what DataParallel costs that processes do not.

    python -m playground data-parallel

The model is copied to every device at every step, and threads share one interpreter lock. Here are the same steps and
the same work both ways; `copying` and `threads` run in one process, `averaging` and `processes` on a rank a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from playground.algorithms.messages import Addressed, Messages, observed
from playground.data_parallel import parallel_apply, replicate, watched
from playground.data_parallel.devices import known
from playground.data_parallel.language import LENGTH, loss_by, optimizer_of, task, train_step
from playground.runtime import device, report
from playground.training.gradients import ALL_REDUCES, average_gradients_flat
from playground.training.partition import share

ROUNDS = 5


def copying(rank: int, size: int, devices: list[str], batch_size: int, steps: int) -> dict[str, Any]:
    """Steps of DataParallel, the loss inside forward: every device gets the model, one gets all gradients.

    {seconds: of a step, median, devices: [{device, sent, received: bytes of model and gradients, in a step}]}
    """
    places = known(devices)
    model, tokens, targets = task(batch_size, places[0])
    step = loss_by("loss", places, places[0]), model, tokens, targets
    with watched(places) as account:
        train_step(*step, optimizer_of(model, account, places[0]))
    moves = [move for move in account.moves if move.part in ("replicate", "reduce")]
    optimizer = optimizer_of(model)
    seconds = median(timed(lambda: train_step(*step, optimizer), places, steps))
    rows = [
        {
            "device": str(place),
            "sent": sum(move.bytes for move in moves if move.source == place),
            "received": sum(move.bytes for move in moves if move.target == place),
        }
        for place in places
    ]
    return {"seconds": seconds, "devices": rows}


def averaging(rank: int, size: int, batch_size: int, steps: int) -> dict[str, Any]:
    """The same steps as sgd takes them: every rank keeps its model, and gradients are averaged.

    {seconds: of a step, median, sent: bytes this rank sends in a step with our ring}
    """
    model, tokens, targets = task(batch_size, device())
    first = sum(share(batch_size, other, size) for other in range(rank))
    mine = slice(first, first + share(batch_size, rank, size))
    tokens, targets, optimizer = tokens[mine].to(device()), targets[mine].to(device()), optimizer_of(model)

    def step(all_reduce: str) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        (loss * size / (batch_size * LENGTH)).backward()
        average_gradients_flat(model, ALL_REDUCES[all_reduce])
        optimizer.step()

    sent = 0

    def count(messages: Messages, send: Sequence[Addressed], receive: Sequence[Addressed]) -> None:
        nonlocal sent
        sent += sum(part.nbytes for part, _ in send)

    with observed(count):
        step("ring")
    return {"seconds": median(timed(lambda: step("backend"), [device()], steps)), "sent": sent}


def threads(rank: int, size: int, devices: list[str]) -> dict[str, dict[str, float]]:
    """Work on one device, then as much on each at once, by threads: {work: {alone, together: seconds}}."""
    torch.set_num_threads(1)
    places, times = known(devices), {}
    for name, (model, inputs) in work(places[0]).items():
        replicas = replicate(model, places)
        given = [(inputs.to(place),) for place in places]
        times[name] = {
            "alone": median(timed(lambda: parallel_apply(replicas[:1], given[:1], None, places[:1]), places[:1])),  # noqa: B023
            "together": median(timed(lambda: parallel_apply(replicas, given, None, places), places)),  # noqa: B023
        }
    return times


def processes(rank: int, size: int) -> dict[str, dict[str, float]]:
    """The same by processes: on rank 0 while the others wait, then on each at once."""
    torch.set_num_threads(1)
    times: dict[str, dict[str, float]] = {}
    for name, (model, inputs) in work(device()).items():
        alone = timed(lambda: model(inputs), [device()]) if rank == 0 else [0.0]  # noqa: B023
        dist.barrier()
        together = timed(lambda: (model(inputs), dist.barrier()), [device()])  # noqa: B023
        times[name] = {"alone": median(alone), "together": median(together)}
    return times


def work(place: torch.device) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Two loads of some 5 to 30 ms: one mostly Python, which holds the interpreter lock, one mostly arithmetic."""
    small = nn.Sequential(*[nn.Linear(8, 8)] * 1000)
    large = nn.Sequential(*[nn.Linear(1024, 1024)] * 4)
    return {
        "many small operations": (small.requires_grad_(False).to(place), torch.zeros(4, 8, device=place)),
        "few large operations": (large.requires_grad_(False).to(place), torch.zeros(256, 1024, device=place)),
    }


def timed(run: Callable[[], Any], places: Sequence[torch.device], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each of `rounds` calls, after one that is not counted. What each of `places` does is waited for."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        for place in places:
            if place.type == "cuda":
                torch.cuda.synchronize(place)
        times.append(time.perf_counter() - started)
        report(step="timed")
    return times[1:]
