"""A communication hook. What did not travel as float16 has digits that float16 lacks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from playground.exercises.cases import WAITED, WIDTHS, Case, Cases


def cases(rank: int, size: int, seed: int) -> Cases:
    """A weight's gradient is 10**rank, on rank 0 what bfloat16 cannot hold, and a little more, less than float16 can
    tell; a bias's is 1. The mean on 3 ranks is no number of float16."""
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
