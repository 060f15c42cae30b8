"""Buckets: the same on all ranks, the last parameters first, none larger than it must be."""

from __future__ import annotations

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, gradients
from playground.exercises.ladder.gradients import average_gradients, describe_reductions, give_gradients

EQUAL, LINEAR = ((4,),) * 4, ((2, 3), (2,), (1, 2), (1,))


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, shapes, cap, due, unused in (  # due: the elements of each bucket
        ("4 parameters of 4 elements, cap 8", EQUAL, 8, (8, 8), None),
        ("parameters of 6, 2, 2 and 1 elements, cap 4", LINEAR, 4, (3, 2, 6), None),
        ("parameters of 6, 2, 2 and 1 elements, cap 100", LINEAR, 100, (11,), None),
        ("parameters of 6, 2, 2 and 1 elements, cap 1", LINEAR, 1, (1, 2, 2, 6), None),
        ("odd ranks have no gradient of parameter 1, cap 4", EQUAL, 4, (4,) * 4, 1),
        ("parameters of 1, 2 and 3 elements, cap 4", ((1,), (2,), (3,)), 4, (3, 3), None),
    ):
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        for place, gradient in enumerate(give_gradients(rank, size, shapes, unused)):
            model[place].grad = None if place == unused and rank % 2 else gradient
        yield Case(
            about,
            (model, cap),
            held=lambda model=model: {"grad": gradients(model), "all_reduce": describe_reductions()},
            expected={"grad": average_gradients(size, shapes, unused), "all_reduce": describe_reductions(due)},
        )
