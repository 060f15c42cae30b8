"""Gradients of all ranks, and their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from playground.exercises.cases import REDUCED

Shapes = Sequence[tuple[int, ...]]


def give_gradients(rank: int, size: int, shapes: Shapes, unused: int | None = None) -> list[torch.Tensor]:
    """N (1 + (i + k) % 5) 10^r in element i of gradient k of rank r: each digit of the mean is a rank's. `unused`: a
    gradient that is zero on odd ranks."""
    gradients = []
    for k, shape in enumerate(shapes):
        row = (torch.arange(torch.Size(shape).numel()) + k) % 5 + 1.0
        gradients.append((row * (0 if k == unused and rank % 2 else size * 10**rank)).view(shape))
    return gradients


def average_gradients(size: int, shapes: Shapes, unused: int | None = None) -> list[torch.Tensor]:
    """The mean of all ranks' gradients."""
    everyones = [give_gradients(rank, size, shapes, unused) for rank in range(size)]
    return [sum(each[1:], each[0]) / size for each in zip(*everyones, strict=True)]


def describe_reductions(elements: Sequence[int] = REDUCED) -> str:
    """The calls of all_reduce: by default those of the solution so far."""
    return f"of {', '.join(map(str, elements))} elements" if elements else "not called"
