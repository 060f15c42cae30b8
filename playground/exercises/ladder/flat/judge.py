"""One all_reduce for all gradients, and the means back in their places."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.ladder.gradients import average_gradients, describe_reductions, give_gradients

SHAPES = {
    "2 gradients of 6 and 2 elements": ((2, 3), (2,)),
    "1 gradient of 4 elements": ((2, 2),),
    "4 gradients, one of them empty": ((3,), (0,), (1, 2, 2), ()),
    "2 gradients, the second not contiguous": ((3,), (4, 2)),
}


def cases(rank: int, size: int, seed: int) -> Cases:
    for about, shapes in SHAPES.items():
        gradients, means = give_gradients(rank, size, shapes), average_gradients(size, shapes)
        if "not contiguous" in about:
            gradients[1], means[1] = gradients[1].t(), means[1].t()
        yield Case(
            about,
            (gradients,),
            held=lambda gradients=(*gradients,): {"gradients": gradients, "all_reduce": describe_reductions()},
            expected={"gradients": means, "all_reduce": describe_reductions([sum(each.numel() for each in means)])},
        )
