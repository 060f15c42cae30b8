"""Judges of the exercises on zero."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from playground.exercises.cases import (
    Actions,
    Case,
    Cases,
    Shapes,
    average_gradients,
    coded,
    give_gradients,
    gradients,
    predict,
)
from playground.exercises.layouts import choose
from playground.training.mesh_costs import TrainingTask, hosts_of_eight
from playground.training.sharding import METHODS, train
from playground.ui.units import plural

EQUAL: Shapes = ((4,),) * 4
HELD = "gradients held when the last one is computed"
OUT, EACH = 2, 3
"""Rows of a weight, and elements of each that are a rank's."""
BYTES = "bytes before, between, after"


def own_share(rank: int, size: int, seed: int) -> Cases:
    """The optimizer's step between the halves of an all-reduce: each rank for its shard."""
    for elements in (2 * size, 2 * size - 1):
        [gradient], [mean] = (
            give_gradients(rank, size, [(elements,)]),
            average_gradients(size, [(elements,)]),
        )
        each = -(-elements // size)
        sent = ", and the shards are sent after it" * (size > 1)
        start = torch.arange(elements) % 7 + 2.0  # a step from zeros would show
        parameters, actions, stepped = start.clone(), Actions(), list[tuple[int, int]]()
        yield Case(
            f"{elements} parameters",
            (parameters, gradient, partial(step, actions, stepped)),
            held=partial(describe_step, size, start, parameters, actions, stepped),
            expected={
                "what the step has subtracted": mean,
                "step": f"called for {plural(each, 'element')}{sent}",
            },
            most_moved=2 * (size - 1) * each,
            actions=actions,
        )


def step(
    actions: Actions,
    stepped: list[tuple[int, int]],
    shard: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """The optimizer's. `stepped`: for how many elements it was called so far, and after how many
    calls of torch.distributed."""
    stepped.append((len(shard), actions.calls))
    shard -= gradient


def describe_step(
    size: int,
    start: torch.Tensor,
    parameters: torch.Tensor,
    actions: Actions,
    stepped: list[tuple[int, int]],
) -> dict[str, object]:
    lengths = ", then for ".join(plural(length, "element") for length, _ in stepped)
    calls = stepped[-1][1] if stepped else 0
    sent = ", and the shards are sent after it"
    if calls == actions.calls:
        sent = f", and nothing is sent after it ({plural(calls, 'call')} before it)"
    return {
        "what the step has subtracted": start - parameters,
        "step": f"called for {lengths}{sent * (size > 1)}" if stepped else "not called",
    }


def reduce_hook(rank: int, size: int, seed: int) -> Cases:
    """Gradients that are reduced to their owners in backward, and freed elsewhere."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in EQUAL])
    held: list[int] = []
    model[0].register_hook(
        lambda gradient: held.append(sum(param.grad is not None for param in [*model][1:]))
    )
    for about, unused in (("all used", None), ("odd ranks do not use parameter 2", 2)):
        held.clear()
        loss = torch.zeros(())
        for place, gradient in enumerate(give_gradients(rank, size, EQUAL)):
            model[place].grad = None
            if place != unused or rank % 2 == 0:
                loss = loss + (model[place] * gradient).sum()
        means = average_gradients(size, EQUAL, unused)
        owned = sum(number % size == rank for number in range(1, len(EQUAL)))
        others = sum(4 for number in range(len(EQUAL)) if number % size != rank)
        yield Case(
            about,
            (model, loss),
            held=partial(describe_backward, model, held if unused is None else []),
            expected={
                "grad": [
                    mean if number % size == rank else None for number, mean in enumerate(means)
                ],
                HELD: f"{owned} of the others" if unused is None else "",
                "hooks": "removed",
            },
            most_moved=max(others, 4 * len(EQUAL) * (size - 1) / size),
        )


def describe_backward(model: nn.ParameterList, held: list[int]) -> dict[str, object]:
    """What is left of a backward. `held`: gradients that were held near its end."""
    has_hooks = any(param._post_accumulate_grad_hooks for param in model)
    return {
        "grad": gradients(model),
        HELD: ", ".join(f"{number} of the others" for number in held),
        "hooks": "left" if has_hooks else "removed",
    }


class TwiceUsed(nn.Linear):
    """[samples, features] times the weight's transpose, then times the weight: the gradient of the
    weight's first use needs the weight, also if the inputs need no gradient."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) @ self.weight


def gather_free(rank: int, size: int, seed: int) -> Cases:
    """A layer whose weight is gathered for forward and for backward, and freed after both."""
    whole = torch.cat([coded(other, OUT * EACH, torch.float32) for other in range(size)]).view(
        OUT, -1
    )
    for about, kind, scale, needs_grad in (
        ("weights of 1 to 5", nn.Linear, 1.0, True),
        ("twice these", nn.Linear, 2.0, True),
        ("inputs without a gradient, a weight that is used twice", TwiceUsed, 1.0, False),
    ):
        layer, oracle = (kind(whole.shape[1], OUT, bias=False) for _ in range(2))
        oracle.weight.data = scale * whole
        shard = scale * whole.flatten().chunk(size)[rank]
        yield Case(
            about,
            (layer, shard),
            returns=use_layer(oracle, needs_grad) | {BYTES: "0, 0, 0"},
            is_coded=kind is nn.Linear,
            run=partial(use_sharded, rank, size, layer, shard, needs_grad),
        )


def use_sharded(
    rank: int,
    size: int,
    layer: nn.Linear,
    shard: torch.Tensor,
    needs_grad: bool,
    function: Callable[..., Any],
) -> dict[str, object]:
    """Forward and backward of a layer that the function has changed."""
    function(rank, size, layer, shard)
    return use_layer(layer, needs_grad)


def use_layer(layer: nn.Linear, needs_grad: bool) -> dict[str, object]:
    """Forward and backward of a layer, and the bytes of its weight's storage."""
    storage = layer.weight.untyped_storage()
    held = [storage.nbytes()]
    inputs = torch.ones(1, layer.in_features, requires_grad=needs_grad)
    output = layer(inputs)
    held.append(storage.nbytes())
    output.sum().backward()
    return {
        "output": output.detach(),
        "gradient of the input": inputs.grad,
        "gradient of the weight": layer.weight.grad,
        # a text: the digits of a number would be those of shares
        BYTES: ", ".join(map(str, [*held, storage.nbytes()])),
    }


def bytes_held(rank: int, size: int, seed: int) -> Cases:
    """What the lesson's four ways hold after backward and a step of Adam, in float32."""
    for layers, width in ((2, 12), (3, 24)):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        batches = torch.ones(1, 2, width)
        counted = {}
        for name, method in METHODS.items():
            *held, _ = train(method(copy.deepcopy(model)), batches)
            counted[name.replace("-", "_")] = round(sum(held))
        parameters = layers * width**2
        yield predict(f"{parameters:,} parameters", (size, parameters), counted)


ALIVE = 2
"""Activations that may be alive when a batch begins: those of the batch before."""


class WatchedModel:
    """A model of one weight, whose activations are followed by weak references."""

    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)
        self.activations: list[Any] = []
        self.most = 0
        """Activations that were alive when a batch began, at most."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, sum(each() is not None for each in self.activations))
        activation = self.weight * batch
        self.activations.append(weakref.ref(activation.untyped_storage()))
        return activation.square().sum()

    def describe(self) -> dict[str, str]:
        alive = str(self.most) if self.most > ALIVE else f"at most {ALIVE}"
        return {"activations alive": alive}


def leak(rank: int, size: int, seed: int) -> Cases:
    """Losses of which one rank has several above the limit. Activations are followed by weak
    references."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, limit = draw.randrange(size), 10.0
        spikes = [draw.randrange(4, 7) * (other == culprit) for other in range(size)]
        inputs = [torch.tensor([1.0 + 4 * (step < spikes[rank])]) for step in range(8)]
        model = WatchedModel()
        yield Case(
            plural(len(inputs), "batch", "es"),
            (inputs, model.forward, limit),
            (sum(spikes), 15.0 * sum(spikes)),
            names=("spikes", "excess"),
            held=model.describe,
            expected={"activations alive": f"at most {ALIVE}"},
            is_coded=False,
            culprit=culprit,
        )


def fit_in_memory(rank: int, size: int, seed: int) -> Cases:
    """ZeRO's stage against the size of a microbatch, on a slow network."""
    task = TrainingTask(
        layers=32, width=4096, length=4096, sequences=128,
        gpus=64, memory=40e9, flops=150e12, machine=hosts_of_eight(1e9, 200e9),
    )  # fmt: skip
    about = "6.4 billion parameters on 64 GPUs of 40 GB"
    yield choose(about, task, {"zero": (0, 1, 2, 3), "microbatch": (1, 2, 4)})
