"""Buckets: the same on all ranks, the last parameters first, none larger than it must be."""

from __future__ import annotations

from dataclasses import dataclass

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake
from playground.exercises.ladder.gradients import Shapes, average_gradients, describe_reductions, give_gradients

BACKWARDS = "reversed([*model.parameters()])"
LAST = "        bucket.append(param.grad)\n    flat(rank, size, bucket)\n"
LINEAR = ((2, 3), (2,), (1, 2), (1,))


@dataclass(frozen=True)
class Buckets:
    about: str
    shapes: Shapes
    cap: int
    due: tuple[int, ...]
    """Elements of each bucket."""
    unused: int | None = None


CASES = (
    Buckets("4 parameters of 4 elements, cap 8", ((4,),) * 4, 8, (8, 8)),
    Buckets("parameters of 6, 2, 2 and 1 elements, cap 4", LINEAR, 4, (3, 2, 6)),
    Buckets("parameters of 6, 2, 2 and 1 elements, cap 100", LINEAR, 100, (11,)),
    Buckets("parameters of 6, 2, 2 and 1 elements, cap 1", LINEAR, 1, (1, 2, 2, 6)),
    Buckets("odd ranks have no gradient of parameter 1, cap 4", ((4,),) * 4, 4, (4,) * 4, unused=1),
)
EXERCISE = Exercise(
    builds_on=("flat",),
    mistakes=(
        Mistake("the cap is ignored", {" > cap": " > 10**9"}, "all gradients are in one bucket"),
        Mistake(
            "a bucket for each gradient",
            {"if bucket and held + param.numel() > cap": "if bucket"},
            "a bucket takes gradients as long as they fit",
        ),
        Mistake(
            "a bucket runs over before it is closed",
            {" + param.numel() > cap": " > cap"},
            "ask before appending whether the gradient still fits",
        ),
        Mistake(
            "the first parameters first",
            {BACKWARDS: "model.parameters()"},
            "their gradients are the last ones that backward has",
        ),
        Mistake(
            "the order differs by rank",
            {BACKWARDS: "[*model.parameters()][:: 1 if rank % 2 else -1]"},
            "an all_reduce adds what the ranks give in their n-th call, whatever it is",
        ),
        Mistake("the last bucket stays behind", {LAST: LAST.partition("\n")[0] + "\n"}, "the loop ends before it"),
        Mistake(
            "skips None on some ranks",
            {"param.grad = torch.zeros_like(param)": "continue"},
            "the others wait in all_reduce for a rank that does not come",
            DEADLOCK,
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    from torch import nn

    for case in CASES:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in case.shapes])
        for place, gradient in enumerate(give_gradients(rank, size, case.shapes, case.unused)):
            model[place].grad = None if place == case.unused and rank % 2 else gradient
        yield Case(
            case.about,
            (model, case.cap),
            held=lambda model=model: {"grad": [each.grad for each in model], "all_reduce": describe_reductions()},
            expected={
                "grad": average_gradients(size, case.shapes, case.unused),
                "all_reduce": describe_reductions(case.due),
            },
        )
