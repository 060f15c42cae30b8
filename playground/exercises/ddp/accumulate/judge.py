"""Gradient accumulation under DistributedDataParallel: a communication hook counts what is synchronised."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.exercises.cases import REDUCED, Case, Cases, gradients
from playground.exercises.exercise import count


def cases(rank: int, size: int, seed: int) -> Cases:
    for parts in (2, 1, 5):
        torch.manual_seed(seed + parts)
        whole = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
        inputs, targets = (torch.randn(size, parts, 4, width).double() for width in (3, 1))
        model, synchronised, memory = DistributedDataParallel(copy.deepcopy(whole)), list[int](), [0]
        model.register_comm_hook(synchronised, average)
        model.module.register_forward_hook(partial(note_memory, memory))
        F.mse_loss(whole(inputs), targets).backward()
        yield Case(
            count(parts, "micro-batch", "es"),
            (model, inputs[rank], targets[rank]),
            held=lambda model=model, synchronised=synchronised, memory=memory: {
                "synchronisations": len(synchronised) + len(REDUCED),
                "samples in memory": describe(memory),
                "grad": gradients(model),
            },
            expected={"synchronisations": 1, "samples in memory": "4 at most", "grad": gradients(whole)},
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
    synchronised.append(bucket.index())
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.group.WORLD.allreduce([buffer]).get_future().then(lambda future: future.value()[0])
