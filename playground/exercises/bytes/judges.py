"""Judge of the exercise on bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from playground.exercises.cases import Case, Cases


def error_feedback(rank: int, size: int, seed: int) -> Cases:
    """Several steps with one residual, which is looked at after each of them."""
    for about, compress in (
        ("the largest element travels", keep_largest),
        ("multiples of 4 travel", round_to_4),
    ):
        given = [torch.tensor([6.0, 4, 1, -3] * 10).roll(other) + other for other in range(size)]
        residuals = [torch.zeros(40) for _ in range(size)]
        means = []
        sums = []
        compressed = []
        for _ in range(4):
            totals = [
                gradient + residual for gradient, residual in zip(given, residuals, strict=True)
            ]
            sent = [compress(total) for total in totals]
            residuals = [total - each for total, each in zip(totals, sent, strict=True)]
            compressed.append(sent)
            means.append(torch.stack(sent).mean(dim=0))
            sums.append(residuals[rank])
        returns = {"gradient": means, "residual": sums}
        run = partial(take_steps, rank, size, given[rank], compress)
        nonzero = [
            sum(int(each.count_nonzero()) for each in steps)
            for steps in zip(*compressed, strict=True)
        ]
        yield Case(
            f"4 steps, {about}",
            (),
            returns=returns,
            run=run,
            is_coded=False,
            most_moved=2 * size * max(nonzero),
            counts=torch.count_nonzero,
        )


def keep_largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (torch.arange(tensor.numel()) == tensor.abs().argmax())


def round_to_4(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor / 4).round() * 4


def take_steps(
    rank: int,
    size: int,
    given: torch.Tensor,
    compress: Callable[..., Any],
    function: Callable[..., Any],
) -> dict[str, list[torch.Tensor]]:
    residual, held = torch.zeros(40), dict[str, list[torch.Tensor]](gradient=[], residual=[])
    for _ in range(4):
        gradient = given.clone()
        function(rank, size, gradient, residual, compress)
        held["gradient"].append(gradient)
        held["residual"].append(residual.clone())
    return held
