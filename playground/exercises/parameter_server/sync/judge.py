"""A synchronous parameter server: what the workers compute their gradients at says when it took its steps."""

from __future__ import annotations

from functools import partial

import torch

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import count


def cases(rank: int, size: int, seed: int) -> Cases:
    for steps, slow in ((1, 0), (4, 1)):
        start = torch.arange(5, dtype=torch.float64)
        targets = start + torch.arange(1, size).pow(2)[:, None]  # where each worker's gradient is zero
        points = [start]
        for _ in range(steps):
            points.append(points[-1] - 0.5 * (points[-1] - targets).mean(dim=0))
        parameters, seen = start.clone(), list[torch.Tensor]()
        yield Case(
            count(steps, "step"),
            (parameters, partial(compute, targets[rank - 1], seen), steps, 0.5),
            held={"seen": seen, "parameters": parameters},
            expected={"seen": points[:-1] if rank else [], "parameters": points[-1]},
            is_coded=False,
            most=dict.fromkeys([0] if rank else range(1, size), 5 * steps),
            delay=0.05 * (rank == slow),
        )


def compute(target: torch.Tensor, seen: list[torch.Tensor], parameters: torch.Tensor) -> torch.Tensor:
    """A worker's gradient. `seen`: what it was computed at so far."""
    seen.append(parameters.clone())
    return parameters - target
