"""Gradient accumulation under DistributedDataParallel: a communication hook counts what is synchronised."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING

from playground.exercises.cases import REDUCED, Case, Cases
from playground.exercises.exercise import Exercise, Mistake

if TYPE_CHECKING:
    import torch

CONTEXT = "contextlib.nullcontext() if is_last else model.no_sync()"
EXERCISE = Exercise(
    preload=("torch._dynamo",),  # which DistributedDataParallel imports
    mistakes=(
        Mistake(
            "synchronises each time",
            {CONTEXT: "contextlib.nullcontext()"},
            "no_sync() must be around the forward pass, too, of all micro-batches but the last",
        ),
        Mistake("unscaled", {" / len(inputs)": ""}, "a sum of means, one for each micro-batch, is no mean"),
        Mistake("never synchronises", {CONTEXT: "model.no_sync()"}, "the last backward has to, for all of them"),
        Mistake(
            "keeps the last micro-batch only",
            {"            loss = ": "            model.zero_grad()\n            loss = "},
            "gradients are set to zero before a step, not before each micro-batch",
        ),
        Mistake(
            "all micro-batches at once",
            {"zip(inputs, targets, strict=True)": "[(inputs, targets)]", "number == len(inputs) - 1": "True"}
            | {" / len(inputs)": ""},
            "there is no memory for that",
        ),
        Mistake(
            "one backward for all",
            {
                "    for number": "    losses = []\n    for number",
                "            loss.backward()\n": "            losses.append(loss)\n    sum(losses).backward()\n",
            },
            "until its backward, a micro-batch takes memory",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    for parts in (2, 1, 5):
        torch.manual_seed(seed + parts)
        whole = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        inputs, targets = (torch.randn(size, parts, 4, width).double() for width in (3, 1))
        model, synchronised, memory = DistributedDataParallel(copy.deepcopy(whole)), list[int](), [0]
        model.register_comm_hook(synchronised, average)
        model.module.register_forward_hook(partial(note_memory, memory))
        F.mse_loss(whole(inputs), targets).backward()
        yield Case(
            f"{parts} micro-batch{'es' * (parts > 1)}",
            (model, inputs[rank], targets[rank]),
            held=lambda model=model, synchronised=synchronised, memory=memory: {
                "synchronisations": len(synchronised) + len(REDUCED),
                "samples in memory": describe(memory),
                "grad": [param.grad for param in model.parameters()],
            },
            expected={
                "synchronisations": 1,
                "samples in memory": "4 at most",
                "grad": [param.grad for param in whole.parameters()],
            },
            is_coded=False,
        )


def note_memory(memory: list[int], model: object, inputs: object, output: torch.Tensor) -> None:
    """Samples are in memory from their forward to their backward. `memory`: their number after each of these."""
    if output.requires_grad:
        memory.append(memory[-1] + output.numel())
        output.register_hook(lambda gradient: memory.append(memory[-1] - output.numel()))


def describe(memory: list[int]) -> str:
    return "4 at most" if max(memory) <= 4 else ", then ".join(map(str, memory))


def average(synchronised: list[int], bucket):  # type: ignore[no-untyped-def]  # torch wants its class, or nothing
    """As DistributedDataParallel does without a hook. All gradients are in one bucket."""
    import torch.distributed as dist

    synchronised.append(bucket.index())
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.group.WORLD.allreduce([buffer]).get_future().then(lambda future: future.value()[0])
