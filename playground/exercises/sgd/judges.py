"""Judges of the exercises on sgd."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from playground.exercises.cases import Case, Cases, coded, held_gradients, held_parameters
from playground.ui.units import plural


def epochs(rank: int, size: int, seed: int) -> Cases:
    """Shuffling without a message: every rank draws the same order, and a new one in every
    epoch."""
    for samples, first, epochs in ((12, 0, 1), (12, 0, 3), (7, 2, 2), (1, 0, 2), (100, 5, 1)):
        due = []
        for epoch in range(first, first + epochs):
            order = torch.randperm(
                samples, generator=torch.Generator().manual_seed(seed + 3 + epoch)
            ).tolist()
            due.append(
                [order[place % samples] for place in range(rank, -(-samples // size) * size, size)]
            )
        about = (
            f"{plural(samples, 'sample')}, "
            f"{plural(epochs, 'epoch')}{f', from epoch {first} on' if first else ''}"
        )
        names = [f"epoch {epoch}" for epoch in range(first, first + epochs)]
        given = samples, seed + 3, first, epochs
        yield Case(about, given, returns=due, names=names, is_coded=False)


OWN, OTHERS = "what rank 0 had", "other tensors than before"


def same_start(rank: int, size: int, seed: int) -> Cases:
    """Replicas begin equal: parameters, frozen ones too, and buffers come from rank 0."""
    for is_frozen in (False, True):
        model = nn.Sequential(
            nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(not is_frozen)
        )
        model.register_buffer("scale", torch.ones(2), persistent=False)
        about = "BatchNorm between two layers"
        if is_frozen:
            about += ", the last one frozen"
        tensors, due = name_tensors(model), dict[str, torch.Tensor]()
        # the frozen one's are more than float16 can hold
        for place, (name, tensor) in enumerate(tensors.items(), 1):
            due[name] = torch.full_like(
                tensor, place + is_frozen * (1 / 3 if tensor.is_floating_point() else 4096)
            )
            tensor.data.copy_(due[name] * 10**rank)
        held = partial(look, model, tensors, due, size)
        yield Case(about, (model,), held=held, expected={"": OWN, **due})


def name_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def look(
    model: nn.Module, tensors: dict[str, torch.Tensor], due: dict[str, torch.Tensor], size: int
) -> dict[str, object]:
    """The tensors; only a remark if the model has others now, or what no rank had: which ones does
    not matter."""
    if any(each is not tensors.get(name) for name, each in name_tensors(model).items()):
        return {"": OTHERS}
    given = {
        name: sum(tensor == due[name] * 10**other for other in range(size))
        for name, tensor in tensors.items()
    }
    new = [name for name, each in given.items() if not each.all()]
    return (
        {"": f"in {len(new)} of {len(tensors)} tensors what no rank had"}
        if new
        else {"": OWN, **tensors}
    )


def average(rank: int, size: int, seed: int) -> Cases:
    """average_gradients of the tutorials, for parameters that not every rank has used, too."""
    for about, unused in (
        ("all used", False),
        ("odd ranks have no gradient of the last parameter", True),
    ):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        params = [*model.parameters()]
        for param in params:
            param.data.add_(rank)  # averaging them would show
        before = [param.detach().clone() for param in params]
        everyones = [
            [coded(other, each.numel(), each.dtype).view_as(each) for each in params]
            for other in range(size)
        ]
        for others in everyones[1::2] if unused else []:
            others[-1].zero_()
        for param, gradient in zip(params, everyones[rank], strict=True):
            param.grad = gradient.clone()
        if unused and rank % 2:
            params[-1].grad = None
        yield Case(
            about,
            (model,),
            held=partial(describe_model, model),
            expected={
                "grad": [sum(each) / size for each in zip(*everyones, strict=True)],
                "parameter": before,
            },
            is_coded=False,
        )


def describe_model(model: nn.Module) -> dict[str, object]:
    return held_gradients(model) | held_parameters(model)


def late_load(rank: int, size: int, seed: int) -> Cases:
    """A checkpoint on one rank, which is not rank 0. All numbers are integers, divided by powers of
    two only: float64 holds each result exactly."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, steps = draw.randrange(1, size), draw.randrange(2, 4)
        saved = [float(draw.randrange(20, 40)), float(draw.randrange(2, 9))]
        rows = [[draw.randrange(1, 9) for _ in range(size)] for _ in range(steps)]
        weight, velocity = saved
        for row in rows:
            velocity = velocity / 2 + sum(row) / size
            weight -= velocity
        given = torch.tensor(saved, dtype=torch.float64) if rank == culprit else None
        yield Case(
            plural(steps, "step"),
            (given, [torch.tensor(row[rank], dtype=torch.float64) for row in rows]),
            returns=weight,
            is_coded=False,
            culprit=culprit,
        )


def own_order(rank: int, size: int, seed: int) -> Cases:
    """One sample is damaged, and cannot be used. At fault is the rank that has it in the first
    epoch. Due are the orders of the program; others may be, too: see `allow_other_orders`."""
    for each, epochs in ((seed, 2), (seed + 1, 3)):
        draw = random.Random(each)
        samples = 3 * size
        damaged = draw.randrange(samples)
        shuffles, order = random.Random(0), list(range(samples))
        usable, owners = list[list[int]](), list[int]()
        for _ in range(epochs):
            shuffles.shuffle(order)
            owners.append(order.index(damaged) % size)
            usable.append([number for number in order[rank::size] if number != damaged])
        seen, due = list[int](), name_samples(usable)
        given = samples, epochs, partial(augment, damaged, seen)
        yield Case(
            f"{samples} samples, {epochs} epochs",
            (),
            returns=due,
            run=partial(name_taken, rank, size, given),
            held=seen,
            combine=partial(allow_other_orders, rank, epochs, damaged, due),
            expected={"calls of augment": samples // size * epochs},
            is_coded=False,
            culprit=owners[0],
        )


def augment(damaged: int, seen: list[int], number: int, generator: random.Random) -> bool:
    """Draw for the damaged sample, and say whether a sample can be used. `seen`: those so far."""
    seen.append(number)
    if number == damaged:
        generator.random()
    return number != damaged


def name_samples(taken: Sequence[Sequence[int]]) -> dict[str, int]:
    """What a rank takes, by epoch and place."""
    return {
        f"epoch {epoch}, sample {place}": number
        for epoch, numbers in enumerate(taken)
        for place, number in enumerate(numbers)
    }


def name_taken(
    rank: int, size: int, given: tuple[object, ...], function: Callable[..., Any]
) -> object:
    taken = function(rank, size, *given)
    is_table = isinstance(taken, list) and all(isinstance(each, list) for each in taken)
    return name_samples(taken) if is_table else taken


def allow_other_orders(
    rank: int, epochs: int, damaged: int, due: dict[str, int], everyones: list[list[int]]
) -> dict[str, int]:
    """If the ranks have divided all samples among them, in each epoch in another way, what this one
    has is `due`, whatever the generator. `everyones`: what each has given to augment, in order."""
    each = len(everyones[rank]) // epochs
    starts = range(0, each * epochs, max(each, 1))
    shares = [[sorted(seen[at:][:each]) for seen in everyones] for at in starts]
    samples = [*range(each * len(everyones))]
    is_order = [sorted(chain(*of_epoch)) == samples for of_epoch in shares]
    is_new = all(of_epoch not in shares[:epoch] for epoch, of_epoch in enumerate(shares))
    if is_new and len(is_order) == epochs and all(is_order):
        mine = (everyones[rank][at:][:each] for at in starts)
        usable = name_samples([[each for each in share if each != damaged] for share in mine])
        due.clear()
        due.update(usable)
    return {"calls of augment": len(everyones[rank])}
