"""Judges of the exercises on zero."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, coded, gradients, predict
from playground.exercises.ladder.judges import Shapes, average_gradients, give_gradients
from playground.exercises.layouts import choose
from playground.training.mesh_costs import TrainingTask, hosts_of_eight
from playground.training.sharding import METHODS, train
from playground.ui.units import plural

EQUAL: Shapes = ((4,),) * 4
OUT, EACH = 2, 3
"""Rows of a weight, and elements of each that are a rank's."""


def own_share(rank: int, size: int, seed: int) -> Cases:
    """The optimizer's step between the halves of an all-reduce: each rank for its shard."""
    for elements in (2 * size, 2 * size - 1):
        [gradient], [mean] = (
            give_gradients(rank, size, [(elements,)]),
            average_gradients(size, [(elements,)]),
        )
        each = -(-elements // size)
        start = torch.arange(elements) % 7 + 2.0  # a step from zeros would show
        parameters, stepped = start.clone(), list[int]()

        def step(shard: torch.Tensor, gradient: torch.Tensor, stepped: list[int] = stepped) -> None:
            stepped.append(len(shard))
            shard -= gradient

        yield Case(
            f"{elements} parameters",
            (parameters, gradient, step),
            held=lambda parameters=parameters, stepped=stepped, start=start: {
                "what the step has subtracted": start - parameters,
                "step": f"called for {', '.join(map(str, stepped)) or 'no'} elements",
            },
            expected={"what the step has subtracted": mean, "step": f"called for {each} elements"},
            most_moved=2 * (size - 1) * each,
        )


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
            held=lambda unused=unused: {
                "grad": gradients(model),
                "gradients of 1 to 3 held when that of 0 is computed": [*held]
                if unused is None
                else [],
                "hooks": "left"
                if any(param._post_accumulate_grad_hooks for param in model)
                else "removed",
            },
            expected={
                "grad": [
                    mean if number % size == rank else None for number, mean in enumerate(means)
                ],
                "gradients of 1 to 3 held when that of 0 is computed": [owned]
                if unused is None
                else [],
                "hooks": "removed",
            },
            most_moved=max(others, 4 * len(EQUAL) * (size - 1) / size),
        )


def gather_free(rank: int, size: int, seed: int) -> Cases:
    """A layer whose weight is gathered for forward and for backward, and freed after both."""
    whole = torch.cat([coded(other, OUT * EACH, torch.float32) for other in range(size)]).view(
        OUT, -1
    )
    for about, scale in (("weights of 1 to 5", 1.0), ("twice these", 2.0)):
        layer = nn.Linear(whole.shape[1], OUT, bias=False)
        shard = scale * whole.flatten().chunk(size)[rank]

        def use(
            function: Callable[..., Any], layer: nn.Linear = layer, shard: torch.Tensor = shard
        ) -> object:
            storage = layer.weight.untyped_storage()
            function(torch.distributed.get_rank(), torch.distributed.get_world_size(), layer, shard)
            freed = [storage.nbytes()]
            inputs = torch.ones(1, layer.in_features, requires_grad=True)
            output = layer(inputs)
            freed.append(storage.nbytes())
            output.sum().backward()
            return {
                "output": output,
                "gradient of the input": inputs.grad,
                "gradient of the weight": layer.weight.grad,
                "bytes before, between, after": [*freed, storage.nbytes()],
            }

        yield Case(
            about,
            (layer, shard),
            returns={
                "output": scale * whole.sum(1)[None],
                "gradient of the input": scale * whole.sum(0)[None],
                "gradient of the weight": torch.ones_like(whole),
                "bytes before, between, after": [0, 0, 0],
            },
            run=use,
        )


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


def leak(rank: int, size: int, seed: int) -> Cases:
    """Losses of which one rank has several above the limit. Activations are followed by weak
    references."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, limit = draw.randrange(size), 10.0
        spikes = [draw.randrange(4, 7) * (other == culprit) for other in range(size)]
        inputs = [torch.tensor([1.0 + 4 * (step < spikes[rank])]) for step in range(8)]
        weight, activations, most = torch.ones(1, requires_grad=True), list[Any](), [0]

        def forward(
            batch: torch.Tensor,
            weight: torch.Tensor = weight,
            activations: list[Any] = activations,
            most: list[int] = most,
        ) -> torch.Tensor:
            alive = sum(activation() is not None for activation in activations)
            most[0] = max(most[0], alive)
            activation = weight * batch
            activations.append(weakref.ref(activation.untyped_storage()))
            return activation.square().sum()

        yield Case(
            plural(len(inputs), "batch", "es"),
            (inputs, forward, limit),
            (sum(spikes), 15.0 * sum(spikes)),
            held=lambda most=most: {
                "activations alive": f"{most[0]}" if most[0] > ALIVE else f"at most {ALIVE}"
            },
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
