"""Forward through all stages and back, one microbatch after the other. One process is the oracle."""

from __future__ import annotations

from functools import partial

import torch

from playground.exercises.cases import Case, Cases, gradients
from playground.exercises.exercise import count
from playground.exercises.pipeline.stages import new_pipeline


def cases(rank: int, size: int, seed: int) -> Cases:
    for microbatches in (3, 1, 6):
        stage, inputs, targets, due = new_pipeline(rank, size, seed, microbatches)
        order: list[str] = []
        stage.register_forward_hook(partial(note, order))
        forward, backward = ([f"{step}{m}" for m in range(microbatches)] for step in "FB")
        yield Case(
            count(microbatches, "microbatch", "es"),
            (stage, inputs, targets),
            held=lambda stage=stage, order=order, forwards=microbatches: {
                "forward": order[:forwards],
                "backward": sorted(order[forwards:]),
                "grad": gradients(stage),
            },
            expected={"forward": forward, "backward": backward, "grad": due},
            is_coded=False,
        )


def note(order: list[str], stage: object, args: object, output: torch.Tensor) -> None:
    """The stage goes forward: F0 is its first microbatch, B0 the backward of it."""
    number = sum(step[0] == "F" for step in order)
    order.append(f"F{number}")
    output.register_hook(lambda gradient: order.append(f"B{number}"))
