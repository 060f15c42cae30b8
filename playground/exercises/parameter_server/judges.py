"""Judges of the exercises on parameter_server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from playground.base.ranks import name_ranks
from playground.exercises.cases import Case, Cases
from playground.ui.units import plural


def sync(rank: int, size: int, seed: int) -> Cases:
    """A synchronous parameter server: what the workers compute their gradients at says when it took
    its steps."""
    for steps, slow in ((1, 0), (4, 1)):
        start = torch.arange(5, dtype=torch.float64)
        # where each worker's gradient is zero
        targets = start + torch.arange(1, size).pow(2)[:, None]
        points = [start]
        for _ in range(steps):
            points.append(points[-1] - 0.5 * (points[-1] - targets).mean(dim=0))
        parameters, seen = start.clone(), list[torch.Tensor]()
        yield Case(
            plural(steps, "step"),
            (parameters, partial(compute, targets[rank - 1], seen), steps, 0.5),
            held={"seen": seen, "parameters": parameters},
            expected={"seen": points[:-1] if rank else [], "parameters": points[-1]},
            is_coded=False,
            most=dict.fromkeys([0] if rank else range(1, size), 5 * steps),
            delay=0.05 * (rank == slow),
        )


def compute(
    target: torch.Tensor, seen: list[torch.Tensor], parameters: torch.Tensor
) -> torch.Tensor:
    """A worker's gradient. `seen`: what it was computed at so far."""
    seen.append(parameters.clone())
    return parameters - target


class Workers:
    """The workers as the server sees them. Worker w computes for `durations[w - 1]` seconds of a
    clock that nobody waits for; `log` says when each got which parameters."""

    def __init__(self, durations: Sequence[float], steps: int) -> None:
        self.durations = durations
        self.now = 0.0
        self.due = dict(enumerate(durations, 1))
        self.left = dict.fromkeys(self.due, steps)
        self.waiting, self.log = set[int](), list[tuple[float, int, int]]()

    def next_push(self) -> tuple[int, torch.Tensor]:
        if not self.due:
            ranks = name_ranks(self.waiting) if self.waiting else "nobody"
            raise RuntimeError(
                f"after {self.now:.2f} s no push will come: replies are due to {ranks}"
            )
        worker = min(self.due, key=lambda worker: self.due[worker])
        self.now = self.due.pop(worker)
        self.waiting.add(worker)
        self.left[worker] -= 1
        gradient = torch.tensor(0)
        dist.recv(gradient, worker)
        return worker, gradient

    def reply(self, worker: int, parameters: torch.Tensor) -> None:
        if worker not in self.waiting:
            raise RuntimeError(f"a reply to rank {worker}, which does not wait for one")
        dist.send(parameters, worker)
        self.waiting.remove(worker)
        self.log.append((self.now, worker, int(parameters)))
        if self.left[worker]:
            self.due[worker] = self.now + self.durations[worker - 1]

    def describe(self) -> dict[str, list[str]]:
        return {"reply": list(map(describe, sorted(self.log)))}


def replies(durations: Sequence[float], steps: int, staleness: int) -> list[tuple[float, int, int]]:
    """When each worker is to get which parameters. Its reply number k comes at its push number k,
    though not before everybody has pushed k - staleness times."""
    pushed, replied = list[list[float]](), [[0.0] * len(durations)]
    for k in range(1, steps + 1):
        pushed.append(
            [start + duration for start, duration in zip(replied[-1], durations, strict=True)]
        )
        slowest = max(pushed[k - staleness - 1]) if k > staleness else 0.0
        replied.append([max(time, slowest) for time in pushed[-1]])
    shares = [(time, 10**worker) for times in pushed for worker, time in enumerate(times, 1)]
    return sorted(
        (time, worker, sum(share for at, share in shares if at <= time))
        for times in replied[1:]
        for worker, time in enumerate(times, 1)
    )


def stale(rank: int, size: int, seed: int) -> Cases:
    """Stale synchronous parallel, by a clock of our own: when a worker pushes follows from when it
    got its replies."""
    durations = (1.0, 2.31, 0.87, 3.77)[: size - 1]
    for staleness, steps in ((2, 5), (1, 4), (0, 3)):
        workers, parameters = Workers(durations, steps), torch.tensor(0)
        due = [] if rank else replies(durations, steps, staleness)
        yield Case(
            f"staleness {staleness}",
            (parameters, steps, staleness, workers),
            held=workers.describe,
            expected={"reply": list(map(describe, due))},
            is_coded=False,
        )


def describe(reply: tuple[float, int, int]) -> str:
    time, worker, parameters = reply
    return f"at {time:.2f} s rank {worker} gets {parameters}"
