"""Judges of the exercises on sgd."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from playground.exercises.cases import UNEVEN, Case, Cases, coded, gradients
from playground.exercises.exercise import count


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
            f"{count(samples, 'sample')}, "
            f"{count(epochs, 'epoch')}{f', from epoch {first} on' if first else ''}"
        )
        yield Case(about, (samples, seed + 3, first, epochs), returns=due, is_coded=False)


OWN, OTHERS = "what rank 0 had", "other tensors than before"


def same_start(rank: int, size: int, seed: int) -> Cases:
    """Replicas begin equal: parameters, frozen ones too, and buffers come from rank 0."""
    for is_frozen in (False, True):
        model = nn.Sequential(
            nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(not is_frozen)
        )
        model.register_buffer("scale", torch.ones(2), persistent=False)
        about = f"BatchNorm between two layers{', the last one frozen' * is_frozen}"
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
            held=lambda model=model: {"grad": gradients(model), "parameter": [*model.parameters()]},
            expected={
                "grad": [sum(each) / size for each in zip(*everyones, strict=True)],
                "parameter": before,
            },
            is_coded=False,
        )


FEATURES, OUTPUTS = 3, 2


def weighted(rank: int, size: int, seed: int) -> Cases:
    """The gradient of the whole batch, held against one process that has all samples."""
    for about, samples in (UNEVEN | {"none on rank 0": (0, 4, 0, 3, 1)}).items():
        if not any(samples[:size]):
            continue
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        everyones = [(draw(number, FEATURES), draw(number, OUTPUTS)) for number in samples[:size]]
        model = nn.Linear(FEATURES, OUTPUTS)
        model.weight.data.copy_(draw(OUTPUTS, FEATURES))
        model.bias.data.fill_(1)
        alone = copy.deepcopy(model).double()
        all_inputs, all_targets = (
            torch.cat(tensors).double() for tensors in zip(*everyones, strict=True)
        )
        mse_loss(alone(all_inputs), all_targets).backward()
        due = gradients(alone.float())
        given, held = (model, *everyones[rank]), partial(gradients, model)
        most = 18 * (size - 1)  # the gradients and some numbers, not 4 samples
        yield Case(about, given, held=held, expected=due, is_coded=False, most_moved=most)


def partition(rank: int, size: int, seed: int) -> Cases:
    """Any order will do, if it is the same on all ranks: what counts is which samples are in which
    partition."""
    for samples, first in ((103, 1 / size), (101, 0.5), (60_000, 1 / size), (2, 1 / size)):
        sizes = [1.0] if size == 1 else [first] + [(1 - first) / (size - 1)] * (size - 1)
        shares = ", ".join(f"{each:.3g}" for each in sizes)
        found = list[list[int]]()
        yield Case(
            f"{count(samples, 'sample')}, partitions of {shares}",
            (samples, sizes, seed + 3),
            run=partial(keep, found, rank, size, samples, sizes, seed + 3),
            held=found,
            combine=partial(look_at_partitions, rank, samples, sizes),
            expected={
                "in no partition": 0,
                "in several": 0,
                "order": "shuffled",
                "another seed": "another partition",
                "size": "as asked",
            },
            is_coded=False,
        )


def keep(found: list[Any], rank: int, size: int, *given: Any) -> None:
    *arguments, function = given
    for seed in (arguments[-1], arguments[-1] + 1):
        returned = function(rank, size, *arguments[:-1], seed)
        found.append(None if returned is None else [int(index) for index in returned])


def look_at_partitions(
    rank: int, samples: int, sizes: list[float], found: list[list[Any]]
) -> object:
    everyones = [first for first, _ in found]
    mine, another = found[rank]
    if None in everyones:
        return mine
    held = Counter(index for each in everyones for index in each)
    order, is_new = "shuffled", mine != another
    if samples >= 100 and mine == sorted(mine):
        order = "as before"
    elif samples >= 100 and len(sizes) > 1 and max(mine) - min(mine) < len(mine):
        order = "shuffled within a block of neighbours"
    return {
        "in no partition": len({*range(samples)} - {*held}),
        "in several": sum(times > 1 for times in held.values()),
        "order": order,
        "another seed": "another partition" if is_new or samples < 100 else "the same partition",
        "size": "as asked"
        if abs(len(mine) - sizes[rank] * samples) < 1 + 1e-6
        else f"{len(mine)} samples",
    }


def not_a_number(rank: int, size: int, seed: int) -> Cases:
    """One rank has no target, another has an infinite loss where it has none."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        empty, infinite = draw.sample(range(size), 2)
        losses = [torch.tensor([draw.randrange(1, 9) / 2 for _ in range(6)]) for _ in range(size)]
        masks = [torch.arange(6) < draw.randrange(1, 6) for _ in range(size)]
        masks[empty][:] = False
        losses[infinite][-1] = torch.inf
        chosen = torch.cat([loss[mask] for loss, mask in zip(losses, masks, strict=True)])
        notes = [
            f"given to rank {other}: {int(masks[other].sum())} targets of 6, the largest loss "
            f"{losses[other].max():g}"
            for other in range(size)
        ]
        yield Case(
            "6 tokens each",
            (losses[rank], masks[rank]),
            chosen.mean().item(),
            is_coded=False,
            culprit=(empty, infinite)[seed % 2],
            notes=notes,
        )
