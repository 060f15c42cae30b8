"""One all_reduce for all gradients, and the means back in their places."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import Exercise, Mistake
from playground.exercises.ladder.gradients import average_gradients, describe_reductions, give_gradients

REDUCE = "    dist.all_reduce(row)\n    row /= size\n"
COPY = """\
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
"""
SHAPES = {
    "2 gradients of 6 and 2 elements": ((2, 3), (2,)),
    "1 gradient of 4 elements": ((2, 2),),
    "4 gradients, one of them empty": ((3,), (0,), (1, 2, 2), ()),
    "2 gradients, the second not contiguous": ((3,), (4, 2)),
}
EXERCISE = Exercise(
    mistakes=(
        Mistake("not copied back", {COPY: ""}, "the row is a copy: the gradients stay as they were"),
        Mistake("forgets to divide", {"    row /= size\n": ""}, "all_reduce leaves the sum"),
        Mistake(
            "an all_reduce for each gradient",
            {REDUCE: "    for gradient in gradients:\n        dist.all_reduce(gradient)\n        gradient /= size\n",
             COPY: ""},
            "the mean is right, but no message is saved",
        ),
        Mistake(
            "each gets the beginning of the row",
            {"part.view_as(gradient)": "row[: gradient.numel()].view_as(gradient)"},
            "the part of the second gradient begins where that of the first ends",
        ),
        Mistake(
            "copied into a copy",
            {"gradient.copy_(part.view_as(gradient))": "gradient.reshape(-1).copy_(part)"},
            "reshape and flatten copy a tensor that is not contiguous",
        ),
    ),
)  # fmt: skip


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
