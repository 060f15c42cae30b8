"""The optimizer's step between the halves of an all-reduce: each rank for its share."""

from __future__ import annotations

import torch

from playground.exercises.cases import Case, Cases
from playground.exercises.ladder.gradients import average_gradients, give_gradients


def cases(rank: int, size: int, seed: int) -> Cases:
    for elements in (2 * size, 2 * size - 1):
        [gradient], [mean] = give_gradients(rank, size, [(elements,)]), average_gradients(size, [(elements,)])
        parameters, stepped = torch.zeros(elements), list[int]()

        def step(share: torch.Tensor, gradient: torch.Tensor, stepped: list[int] = stepped) -> None:
            stepped.append(len(share))
            share -= gradient

        yield Case(
            f"{elements} parameters",
            (parameters, gradient, step),
            held=lambda parameters=parameters, stepped=stepped: {
                "parameters": -parameters,
                "step": f"called for {', '.join(map(str, stepped)) or 'no'} elements",
            },
            expected={"parameters": mean, "step": f"called for {-(-elements // size)} elements"},
        )
