"""All-reduces in backward: begun there, in one order on all ranks, and over before the step."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

from playground.exercises.cases import REDUCED, WAITED, Case, Cases, gradients
from playground.exercises.ladder.gradients import average_gradients, give_gradients

SHAPES = ((4,),) * 4
IN_FLIGHT, WAITS, NONE = "begun", "waited for", "none begun"
BEGINS = 0.5
"""Seconds that a thread of the solution may take to begin one."""


def cases(rank: int, size: int, seed: int) -> Cases:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    seen: list[str] = []
    model[0].register_hook(lambda gradient: seen.append(look()))

    def step() -> None:
        with torch.no_grad():
            for param in model:
                param -= 0 if param.grad is None else param.grad

    for about, unused in (
        ("all used", None),
        ("all used, the same model again", None),
        ("odd ranks do not use parameter 2", 2),
    ):
        seen.clear()
        loss = torch.zeros(())
        for place, gradient in enumerate(give_gradients(rank, size, SHAPES)):
            model[place].grad = None
            model[place].data.zero_()
            if place != unused or rank % 2 == 0:
                loss = loss + (model[place] * gradient).sum()
        means = average_gradients(size, SHAPES, unused)
        due = describe(means, means, sum(mean.numel() for mean in means), [IN_FLIGHT] * (unused is None), "removed")
        yield Case(
            about,
            (model, loss, step),
            held=lambda unused=unused: describe(
                [-param for param in model],
                gradients(model),
                sum(REDUCED),
                seen if unused is None else [],
                "left" if any(param._post_accumulate_grad_hooks for param in model) else "removed",
            ),
            expected=due,
        )


def look() -> str:
    """What has become of all-reduces when the last gradient of backward is ready."""
    end = time.monotonic() + BEGINS
    while not REDUCED and time.monotonic() < end:
        time.sleep(0.01)
    return WAITS if threading.get_ident() in WAITED else IN_FLIGHT if REDUCED else NONE


def describe(parameters: object, grad: object, reduced: int, seen: list[str], hooks: str) -> dict[str, object]:
    return {
        "parameter": parameters,
        "grad": grad,
        "all_reduce": f"of {reduced} elements in all",
        "all_reduces when backward ends": ", ".join(seen),
        "hooks": hooks,
    }
