"""All-reduces in backward: begun there, in one order on all ranks, and over before the step."""

from __future__ import annotations

import threading
import time

from playground.exercises.cases import REDUCED, WAITED, Case, Cases
from playground.exercises.exercise import DEADLOCK, Exercise, Mistake
from playground.exercises.ladder.gradients import average_gradients, give_gradients

SHAPES = ((4,),) * 4
UNUSED = {"all used": None, "all used, the same model again": None, "odd ranks do not use parameter 2": 2}
IN_FLIGHT, WAITS, NONE = "begun", "waited for", "none begun"
BEGINS = 0.5
"""Seconds that a thread of the solution may take to begin one."""
EACH, WAIT, STEP = "    for param, work in works.items():\n", "        work.wait()\n", "    step()\n"
WITHOUT = """\
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        collect(param)
"""
HOOKS = "hooks.append(param.register_post_accumulate_grad_hook(collect))"
ORDERLY = """\
        while len(works) < len(params) and params[len(works)] in ready:
            following = params[len(works)]
            works[following] = dist.all_reduce(following.grad, async_op=True)
"""
AT_ONCE = """\
        if param not in works:
            works[param] = dist.all_reduce(param.grad, async_op=True)
"""
EXERCISE = Exercise(
    mistakes=(
        Mistake("no wait before the step", {WAIT: ""}, "the step takes gradients that are still being reduced"),
        Mistake(
            "waits after the step",
            {STEP: "", EACH: f"{STEP}{EACH}"},
            "the step takes gradients that are still being reduced",
        ),
        Mistake("all after backward", {HOOKS: "pass"}, "nothing is on its way while backward computes"),
        Mistake(
            "waits in the hook",
            {"dist.all_reduce(following.grad, async_op=True)": "None; dist.all_reduce(following.grad)", WAIT: ""},
            "backward waits until a gradient has come back",
        ),
        Mistake(
            "an unused parameter hangs",
            {WITHOUT: "        pass\n"},
            "its hook never runs, and the others wait for this rank",
            DEADLOCK,
        ),
        Mistake(
            "the order differs by rank",
            {ORDERLY: AT_ONCE},
            "where a parameter is not used, those behind it leave early",
        ),
        Mistake(
            "hooks are left behind",
            {"    for hook in hooks:\n        hook.remove()\n": ""},
            "in the next step they run again, with the lists of this one",
        ),
        Mistake("forgets to divide", {"        param.grad /= size\n": ""}, "all_reduce leaves the sum"),
    )
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    from torch import nn

    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    seen: list[str] = []

    def look(gradient: torch.Tensor) -> None:
        """The last gradient of backward is ready."""
        end = time.monotonic() + BEGINS
        while not REDUCED and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(WAITS if threading.get_ident() in WAITED else IN_FLIGHT if REDUCED else NONE)

    model[0].register_hook(look)

    def step() -> None:
        with torch.no_grad():
            for param in model:
                param -= 0 if param.grad is None else param.grad

    for about, unused in UNUSED.items():
        seen.clear()
        loss = torch.zeros(())
        for place, gradient in enumerate(give_gradients(rank, size, SHAPES)):
            model[place].grad = None
            model[place].data.zero_()
            if place != unused or rank % 2 == 0:
                loss = loss + (model[place] * gradient).sum()
        means = average_gradients(size, SHAPES, unused)
        yield Case(
            about,
            (model, loss, step),
            held=lambda unused=unused: {
                "parameter": [-param for param in model],
                "grad": [param.grad for param in model],
                "all_reduce": f"of {sum(REDUCED)} elements in all",
                "all_reduces when backward ends": ", ".join(seen if unused is None else []),
                "hooks": "left" if any(param._post_accumulate_grad_hooks for param in model) else "removed",
            },
            expected={
                "parameter": means,
                "grad": means,
                "all_reduce": f"of {sum(mean.numel() for mean in means)} elements in all",
                "all_reduces when backward ends": IN_FLIGHT if unused is None else "",
                "hooks": "removed",
            },
        )
