"""Judges of the exercises on ddp."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.exercises.cases import (
    UNEVEN,
    Actions,
    Case,
    Cases,
    gradients,
    held_parameters,
)
from playground.ui.units import plural


def accumulate(rank: int, size: int, seed: int) -> Cases:
    """Gradient accumulation under DistributedDataParallel: a communication hook counts what is
    synchronised."""
    for parts in (2, 1, 5):
        torch.manual_seed(seed + parts)
        whole = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        inputs, targets = (torch.randn(size, parts, 4, width).double() for width in (3, 1))
        model = DistributedDataParallel(copy.deepcopy(whole))
        synchronised = list[int]()
        memory, actions = [0], Actions()
        model.register_comm_hook(synchronised, average)
        model.module.register_forward_hook(partial(note_memory, memory))
        F.mse_loss(whole(inputs), targets).backward()
        yield Case(
            plural(parts, "micro-batch", "es"),
            (model, inputs[rank], targets[rank]),
            actions=actions,
            held=partial(describe_accumulation, model, synchronised, memory, actions),
            expected={
                "synchronisations": 1,
                "samples in memory": "4 at most",
                "grad": gradients(whole),
            },
            is_coded=False,
        )


def describe_accumulation(
    model: nn.Module, synchronised: list[int], memory: list[int], actions: Actions
) -> dict[str, object]:
    return {
        "synchronisations": len(synchronised) + len(actions.reduced),
        "samples in memory": describe(memory),
        "grad": gradients(model),
    }


def note_memory(memory: list[int], model: object, inputs: object, output: torch.Tensor) -> None:
    """Samples are in memory from their forward to their backward. `memory`: their number after each
    of these."""
    if output.requires_grad:
        memory.append(memory[-1] + output.numel())
        output.register_hook(lambda gradient: memory.append(memory[-1] - output.numel()))


def describe(memory: list[int]) -> str:
    return "4 at most" if max(memory) <= 4 else ", then ".join(map(str, memory))


def average(synchronised: list[int], bucket):  # type: ignore[no-untyped-def]  # torch wants its class, or nothing
    """As DistributedDataParallel does without a hook. All gradients are in one bucket."""
    synchronised.append(bucket.index())
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.group.WORLD.allreduce([buffer]).get_future().then(lambda future: future.value()[0])


def hook(rank: int, size: int, seed: int) -> Cases:
    """A communication hook. What did not travel as float16 has digits that float16 lacks: a
    weight's gradient is size times a share, on rank 0 what bfloat16 cannot hold, and a little more,
    less than float16 can tell; a bias's is size. float16 also holds these divided by size, and
    their sums to 1e-4, so that a hook may divide before the sum."""
    for about, width in (("one bucket", 1), ("several buckets", 300)):
        model = DistributedDataParallel(nn.Linear(4, width), bucket_cap_mb=0.001)
        hooks, dtypes, actions = list[str](), set[str](), Actions()
        model.register_comm_hook = partial(
            register, model.register_comm_hook, hooks, dtypes, actions
        )
        shares = [2 + 2**-7, 10, 100, 16, 32][:size]
        means = {
            "weight": torch.full((width, 4), float(sum(shares))),
            "bias": torch.full((width,), float(size)),
        }
        yield Case(
            about,
            (model, torch.full((size, 4), shares[rank] * (1 + 2**-12))),
            actions=actions,
            held=partial(describe_hooks, model.module, hooks, dtypes, actions),
            expected={
                "hooks that waited": 0,
                "dtype of the future's value": "torch.float32",
                "bytes of an element": 2,
                "grad": means,
            },
            is_coded=False,
        )


def describe_hooks(
    model: nn.Module, hooks: list[str], dtypes: set[str], actions: Actions
) -> dict[str, object]:
    return {
        "hooks that waited": len(hooks),
        "dtype of the future's value": ", ".join(sorted(dtypes)),
        "bytes of an element": max([2, *actions.widths]),
        "grad": {name: param.grad for name, param in model.named_parameters()},
    }


def register(
    real: Callable[..., None],
    hooks: list[str],
    dtypes: set[str],
    actions: Actions,
    state: object,
    hook: Callable[..., Any],
) -> None:
    """Register a hook of the solution, and note whether it waits, in its own thread, and the dtype
    of what it returns."""

    def note(future: torch.futures.Future[Any]) -> Any:
        value = future.value()
        dtypes.add(str(getattr(value, "dtype", type(value).__name__)))
        return value

    @functools.wraps(hook)
    def look(state: object, bucket: Any) -> Any:
        before = len(actions.waited)
        future = hook(state, bucket)
        if threading.get_ident() in actions.waited[before:]:
            hooks.append(hook.__name__)
        return future.then(note) if isinstance(future, torch._C.Future) else future

    real(state, look)


def accuracy(rank: int, size: int, seed: int) -> Cases:
    """The accuracy of a whole test set, of which each sample is computed once."""
    for samples in (10, 7, 1, 100):
        seen = list[int]()
        due = sum(map(is_right, range(samples))) / samples
        combine = partial(count_samples, samples)
        expected = {"never computed": 0, "computed again": 0}
        given = (samples, partial(is_right, seen=seen))
        yield Case(
            plural(samples, "sample"),
            given,
            due,
            held=seen,
            combine=combine,
            expected=expected,
            is_coded=False,
        )


def is_right(index: int, seen: list[int] | None = None) -> bool:
    """Whether the model gets a sample right: the first ones more often than others. `seen`: those
    computed so far."""
    if seen is not None:
        seen.append(index)
    return index % 7 < 3 or index < 5


def count_samples(samples: int, everyones: list[list[int]]) -> dict[str, int]:
    computed = [index for each in everyones for index in each]
    return {
        "never computed": samples - len({*computed}),
        "computed again": len(computed) - len({*computed}),
    }


def uneven(rank: int, size: int, seed: int) -> Cases:
    """Steps with as many ranks as still have a batch. One process in float64 is the oracle."""
    for about, numbers in UNEVEN.items():
        torch.manual_seed(seed)
        model = nn.Linear(3, 1).double()
        alone = copy.deepcopy(model)
        everyones = [
            [tuple(torch.randn(2, 4, 3).double()) for _ in range(number)]
            for number in numbers[:size]
        ]
        everyones = [[(inputs, targets[:, :1]) for inputs, targets in each] for each in everyones]
        for number in range(max(numbers[:size])):
            alone.zero_grad()
            losses = [
                F.mse_loss(alone(each[number][0]), each[number][1])
                for each in everyones
                if number < len(each)
            ]
            torch.stack(losses).mean().backward()
            take_step(alone)
        given, due = (model, everyones[rank], partial(take_step, model)), list(alone.parameters())
        held = {"parameter": list(model.parameters())}
        about = about.replace("sample", "batch").replace("batchs", "batches")
        # in each step the gradients and some numbers, not a batch
        most = 10 * (size - 1) * (max(numbers[:size]) + 1)
        yield Case(
            about, given, held=held, expected={"parameter": due}, is_coded=False, most_moved=most
        )


def take_step(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad


def drift(rank: int, size: int, seed: int) -> Cases:
    """Batches of ones, and in the last step large ones on one rank: its own norm and its own loss
    are unlike the others'."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        culprit, steps, limit = draw.randrange(size), draw.randrange(2, 4), 2.0
        model, whole = (nn.Linear(3, 2) for _ in range(2))
        for param in (*model.parameters(), *whole.parameters()):
            nn.init.constant_(param, 0.25)
        batches = torch.ones(size, steps, 2, 3)
        batches[:, :, :, 1] = draw.randrange(2, 5) / 4
        batches[culprit, -1] *= 9
        for step in range(steps):
            whole.zero_grad()
            whole(batches[:, step].flatten(0, 1)).square().mean().backward()
            params = list(whole.parameters())
            norm = nn.utils.get_total_norm([param.grad for param in params])
            with torch.no_grad():
                for param in params:
                    param -= 0.1 * param.grad * min(1.0, limit / norm.item())
        yield Case(
            plural(steps, "step"),
            (model, list(batches[rank]), limit),
            held=partial(held_parameters, model),
            expected={"parameter": [*whole.parameters()]},
            is_coded=False,
            culprit=culprit,
        )


def sync_batch_norm(rank: int, size: int, seed: int) -> Cases:
    """Normalised samples and running statistics. BatchNorm1d on the whole batch is the oracle."""
    features = 3
    for place, (about, samples) in enumerate(UNEVEN.items()):
        torch.manual_seed(seed + place)
        everyones = [20 * torch.randn(9 * number, features) for number in samples[:size]]
        for other, each in enumerate(everyones):
            each += 5.0 * other + 1000.0 * (place == 0)
            each *= 0.001 if place == 2 else 1.0  # EPSILON matters beside such a variance
        whole = nn.BatchNorm1d(features, affine=False, momentum=0.3).double()
        due = whole(torch.cat(everyones).double()).float().split([len(each) for each in everyones])
        running = torch.zeros(features), torch.ones(features)
        given = everyones[rank], *running, 0.3
        yield Case(
            f"9 times {about}",
            given,
            returns=due[rank],
            run=partial(normalise, rank, size, given, due[rank]),
            held={"running": running},
            expected={"running": (whole.running_mean.float(), whole.running_var.float())},
            is_coded=False,
            most_moved=4 * (2 * features + 1),
        )


ROUNDED = 2e-5
"""The difference of a normalised sample where its mean is summed in float32, at most."""


def normalise(
    rank: int, size: int, given: tuple[Any, ...], due: torch.Tensor, function: Callable[..., Any]
) -> Any:
    """The result, without what is rounded: samples near their mean are near 0."""
    result = function(rank, size, *given)
    if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (
        due.shape,
        due.dtype,
    ):
        return result
    return torch.where((result - due).abs() < ROUNDED, due, result)


def counted_twice(rank: int, size: int, seed: int) -> Cases:
    """One sample fewer than the ranks can test in turns: the last of the ranks' order has one
    fewer."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        places = draw.sample(range(size), size)
        samples = draw.randrange(2, 6) * size - 1
        right = [draw.random() < 0.6 for _ in range(samples)]
        right[:2] = True, False
        first = places.index(rank)
        yield Case(
            f"{samples} samples",
            (samples, places, right.__getitem__),
            (len(range(first, samples, size)), sum(right) / samples),
            names=("samples tested", "accuracy"),
            is_coded=False,
            culprit=places[-1],
        )
