"""Judges of the exercises on ddp."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.exercises.cases import REDUCED, WAITED, WIDTHS, Case, Cases, gradients
from playground.exercises.exercise import count


def accumulate(rank: int, size: int, seed: int) -> Cases:
    """Gradient accumulation under DistributedDataParallel: a communication hook counts what is synchronised."""
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


def hook(rank: int, size: int, seed: int) -> Cases:
    """A communication hook. What did not travel as float16 has digits that float16 lacks: a weight's gradient is
    10**rank, on rank 0 what bfloat16 cannot hold, and a little more, less than float16 can tell; a bias's is 1. The
    mean on 3 ranks is no number of float16."""
    for about, width in (("one bucket", 1), ("several buckets", 300)):
        model, hooks = DistributedDataParallel(nn.Linear(4, width), bucket_cap_mb=0.001), list[str]()
        model.register_comm_hook = functools.partial(register, model.register_comm_hook, hooks)
        shares = [10**other if other else 2 + 2**-7 for other in range(size)]
        means = {"weight": torch.full((width, 4), sum(shares) / size), "bias": torch.ones(width)}
        yield Case(
            about,
            (model, torch.full((1, 4), shares[rank] * (1 + 2**-12))),
            held=lambda model=model, hooks=hooks: {
                "hooks that waited": len(hooks),
                "bytes of an element": max([2, *WIDTHS]),
                "grad": {name: param.grad for name, param in model.module.named_parameters()},
            },
            expected={"hooks that waited": 0, "bytes of an element": 2, "grad": means},
            is_coded=False,
        )


def register(real: Callable[..., None], hooks: list[str], state: object, hook: Callable[..., Any]) -> None:
    """Register a hook of the solution, and note whether it waits. Its own thread is what counts."""

    @functools.wraps(hook)
    def look(state: object, bucket: Any) -> Any:
        before = len(WAITED)
        future = hook(state, bucket)
        if threading.get_ident() in WAITED[before:]:
            hooks.append(hook.__name__)
        return future

    real(state, look)
