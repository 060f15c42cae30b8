"""Gradients that are reduced to their owners in backward, and freed elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, gradients
from playground.exercises.ladder.gradients import average_gradients, give_gradients

SHAPES = ((4,),) * 4


def cases(rank: int, size: int, seed: int) -> Cases:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    held: list[int] = []
    model[0].register_hook(lambda gradient: held.append(sum(param.grad is not None for param in [*model][1:])))
    for about, unused in (("all used", None), ("odd ranks do not use parameter 2", 2)):
        held.clear()
        loss = torch.zeros(())
        for place, gradient in enumerate(give_gradients(rank, size, SHAPES)):
            model[place].grad = None
            if place != unused or rank % 2 == 0:
                loss = loss + (model[place] * gradient).sum()
        means = average_gradients(size, SHAPES, unused)
        owned = sum(number % size == rank for number in range(1, len(SHAPES)))
        yield Case(
            about,
            (model, loss),
            held=lambda unused=unused: {
                "grad": gradients(model),
                "gradients of 1 to 3 held when that of 0 is computed": [*held] if unused is None else [],
                "hooks": "left" if any(param._post_accumulate_grad_hooks for param in model) else "removed",
            },
            expected={
                "grad": [mean if number % size == rank else None for number, mean in enumerate(means)],
                "gradients of 1 to 3 held when that of 0 is computed": [owned] if unused is None else [],
                "hooks": "removed",
            },
        )
