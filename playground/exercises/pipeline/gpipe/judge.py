"""Forward through all stages and back, one microbatch after the other. One process is the oracle."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import DEADLOCK, ERROR, Exercise, Mistake

if TYPE_CHECKING:
    import torch

BACKWARD = "    for features, output in held:\n"
EXERCISE = Exercise(
    preload=("torch.fx.experimental.symbolic_shapes",),  # which a backward from a given gradient imports
    mistakes=(
        Mistake(
            "the received activation lacks requires_grad",
            {"            features.requires_grad_()\n": ""},
            "autograd computes no gradient of it, which the stage before needs",
            ERROR,
        ),
        Mistake("unscaled", {" / len(inputs)": ""}, "a sum of means, one for each microbatch, is no mean"),
        Mistake(
            "one microbatch at a time",
            {BACKWARD: "        features, output = held[-1]\n"},
            "one stage works while all others wait",
        ),
        Mistake(
            "keeps the last microbatch only",
            {BACKWARD: f"{BACKWARD}        features, output = held[-1]\n"},
            "its graph is used up by its own backward",
            ERROR,
        ),
        Mistake(
            "sends back the gradient that it received",
            {"dist.send(features.grad,": "dist.send(features.grad if rank == size - 1 else gradient,"},
            "the stage's own part of the chain rule is missing",
        ),
        Mistake(
            "sends no gradients back",
            {"            dist.send(features.grad, rank - 1)\n": "            pass\n"},
            "autograd does not reach across ranks",
            DEADLOCK,
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    from playground.exercises.pipeline.stages import new_pipeline

    for microbatches in (3, 1, 6):
        mine, order = new_pipeline(rank, size, seed, microbatches), list[str]()
        mine.stage.register_forward_hook(partial(note, order))
        forward, backward = ([f"{step}{m}" for m in range(microbatches)] for step in "FB")
        yield Case(
            f"{microbatches} microbatch{'es' * (microbatches > 1)}",
            (mine.stage, mine.inputs, mine.targets),
            held=lambda mine=mine, order=order: {
                "forward": order[: len(mine.inputs)],
                "backward": sorted(order[len(mine.inputs) :]),
                "grad": [param.grad for param in mine.stage.parameters()],
            },
            expected={"forward": forward, "backward": backward, "grad": mine.gradients},
            is_coded=False,
        )


def note(order: list[str], stage: object, args: object, output: torch.Tensor) -> None:
    """The stage goes forward: F0 is its first microbatch, B0 the backward of it."""
    number = sum(step[0] == "F" for step in order)
    order.append(f"F{number}")
    output.register_hook(lambda gradient: order.append(f"B{number}"))
