"""Judges of the exercises on ladder."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from playground.exercises.cases import (
    Actions,
    Case,
    Cases,
    Shapes,
    average_gradients,
    counting,
    give_gradients,
    gradients,
    predict,
)
from playground.training.averaging import bucketed, flat as flat_rung, per_parameter
from playground.ui.units import plural


def describe_reductions(elements: Sequence[int]) -> str:
    """The calls of all_reduce."""
    return f"of {', '.join(map(str, elements))} elements" if elements else "not called"


def describe_flat(gradients: Sequence[torch.Tensor | None], actions: Actions) -> dict[str, object]:
    return {"gradients": gradients, "all_reduce": describe_reductions(actions.reduced)}


def describe_buckets(model: nn.Module, actions: Actions) -> dict[str, object]:
    return {"grad": gradients(model), "all_reduce": describe_reductions(actions.reduced)}


SHAPES = {
    "2 gradients of 6 and 2 elements": ((2, 3), (2,)),
    "1 gradient of 4 elements": ((2, 2),),
    "4 gradients, one of them empty": ((3,), (0,), (1, 2, 2), ()),
    "2 gradients, the second not contiguous": ((3,), (4, 2)),
}


def flat(rank: int, size: int, seed: int) -> Cases:
    """One all_reduce for all gradients, and the means back in their places."""
    for about, shapes in SHAPES.items():
        gradients, means = give_gradients(rank, size, shapes), average_gradients(size, shapes)
        if "not contiguous" in about:
            gradients[1], means[1] = gradients[1].t(), means[1].t()
        actions = Actions()
        yield Case(
            about,
            (gradients,),
            actions=actions,
            held=partial(describe_flat, (*gradients,), actions),
            expected={
                "gradients": means,
                "all_reduce": describe_reductions([sum(each.numel() for each in means)]),
            },
        )


EQUAL: Shapes = ((4,),) * 4
LINEAR: Shapes = ((2, 3), (2,), (1, 2), (1,))


def buckets(rank: int, size: int, seed: int) -> Cases:
    """Buckets: the same on all ranks, the last parameters first, none larger than it must be."""
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
        actions = Actions()
        yield Case(
            about,
            (model, cap),
            actions=actions,
            held=partial(describe_buckets, model, actions),
            expected={
                "grad": average_gradients(size, shapes, unused),
                "all_reduce": describe_reductions(due),
            },
        )


IN_FLIGHT = "begun"
WAITS = "waited for"
SOME = "begun for"
NONE = "none begun"
BEGINS = 0.5
"""Seconds that a thread of the solution may take to begin one."""


ALL_USED = (("all used", None), ("all used, the same model again", None))


def early(rank: int, size: int, seed: int) -> Cases:
    """All-reduces in backward: begun there, and over before the step."""
    return reduce_in_backward(rank, size, ALL_USED)


def overlap(rank: int, size: int, seed: int) -> Cases:
    """The same, in one order on all ranks, where not all of them use all parameters."""
    return reduce_in_backward(rank, size, (*ALL_USED, ("odd ranks do not use parameter 2", 2)))


def reduce_in_backward(rank: int, size: int, situations: Sequence[tuple[str, int | None]]) -> Cases:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in EQUAL])

    def step() -> None:
        with torch.no_grad():
            for param in model:
                param -= 0 if param.grad is None else param.grad

    for about, unused in situations:
        seen, actions = list[str](), Actions()
        hook = model[0].register_hook(partial(look, seen, actions))
        loss = torch.zeros(())
        for place, gradient in enumerate(give_gradients(rank, size, EQUAL)):
            model[place].grad = None
            model[place].data.zero_()
            if place != unused or rank % 2 == 0:
                loss = loss + (model[place] * gradient).sum()
        means = average_gradients(size, EQUAL, unused)
        due = describe(
            means,
            means,
            sum(mean.numel() for mean in means),
            [IN_FLIGHT] if unused is None else [],
            "removed",
        )
        yield Case(
            about,
            (model, loss, step),
            actions=actions,
            held=partial(describe_backward, model, actions, seen if unused is None else []),
            expected=due,
        )
        hook.remove()


def look(seen: list[str], actions: Actions, gradient: object) -> None:
    """Note the state of all-reduces when the last gradient of backward is ready: those before it
    are due, but for one that may travel with it."""
    due, end = 4 * (len(EQUAL) - 2), time.monotonic() + BEGINS
    while sum(actions.reduced) < due and time.monotonic() < end:
        time.sleep(0.01)
    if threading.get_ident() in actions.waited:
        seen.append(WAITS)
    elif sum(actions.reduced) >= due:
        seen.append(IN_FLIGHT)
    elif actions.reduced:
        seen.append(f"{SOME} {sum(actions.reduced)} of {due} elements")
    else:
        seen.append(NONE)


def describe_backward(
    model: nn.ParameterList, actions: Actions, seen: list[str]
) -> dict[str, object]:
    """What is left of a backward. `seen`: the state of all-reduces at its end."""
    has_hooks = any(param._post_accumulate_grad_hooks for param in model)
    return describe(
        [-param for param in model],
        gradients(model),
        sum(actions.reduced),
        seen,
        "left" if has_hooks else "removed",
    )


def describe(
    parameters: object, grad: object, reduced: int, seen: list[str], hooks: str
) -> dict[str, object]:
    return {
        "parameter": parameters,
        "grad": grad,
        "all_reduce": f"of {reduced} elements in all",
        "all_reduces when backward ends": ", ".join(seen),
        "hooks": hooks,
    }


def local_sgd(rank: int, size: int, seed: int) -> Cases:
    """Steps that differ between ranks, so that it shows when parameters were averaged."""
    for steps, every in ((4, 2), (5, 2), (3, 1), (2, 5)):
        model, *everyones = (nn.Linear(2, 1) for _ in range(size + 1))
        for param in (param for each in (model, *everyones) for param in each.parameters()):
            nn.init.ones_(param)
        for number in range(1, steps + 1):
            for other, each in enumerate(everyones):
                change(other, each, number)
            for params in zip(*(each.parameters() for each in everyones), strict=True):
                mean = torch.stack(params).mean(dim=0).detach()
                for param in params if number % every == 0 or number == steps else ():
                    param.data.copy_(mean)
        held = {"parameter": [*model.parameters()]}
        due = {"parameter": [*everyones[rank].parameters()]}
        about, step = f"{plural(steps, 'step')}, every {every}", partial(change, rank, model)
        most = 3 * max(1, size - 1) * -(-steps // every)  # the model has three parameters
        yield Case(
            about,
            (model, step, steps, every),
            held=held,
            expected=due,
            is_coded=False,
            most_moved=most,
        )


@torch.no_grad()
def change(rank: int, model: nn.Module, number: int) -> None:
    """Step `number` of a rank."""
    for param in model.parameters():
        param.mul_(1 / (rank + 2)).add_(number * 10**rank)


def rung_traffic(rank: int, size: int, seed: int) -> Cases:
    """Three rungs of the ladder, each on the same gradients, with a counter."""
    for each, cap in (((6, 2, 2, 1), 16), ((3, 3, 3, 3, 3), 100), ((50, 1, 1, 1, 60), 40)):
        sizes = [size * elements for elements in each]
        model = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for elements in sizes])
        rungs = (
            per_parameter,
            flat_rung,
            partial(bucketed, bucket_cap=size * cap),
        )
        traffic = []
        for rung in rungs:
            for param in model:
                param.grad = torch.ones_like(param)
            with counting() as counter:
                rung(model)
            traffic.append(counter)
        counted = {
            "calls": [counter.calls["all_reduce"] for counter in traffic],
            "bytes": [round(counter.sent) for counter in traffic],
        }
        about = f"parameters of {', '.join(map(str, sizes))}, cap {size * cap} bytes"
        yield predict(about, (size, sizes, size * cap), counted)
