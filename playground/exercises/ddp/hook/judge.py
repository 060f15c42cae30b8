"""A communication hook. What did not travel as float16 has digits that float16 lacks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from playground.exercises.cases import WAITED, WIDTHS, Case, Cases
from playground.exercises.exercise import Exercise, Mistake

REQUEST = "request.get_future().then(decompress)"
EXERCISE = Exercise(
    worlds=(2, 3, 1, 4),
    preload=("torch._dynamo",),  # which DistributedDataParallel imports
    mistakes=(
        Mistake("undivided", {".div_(size)": ""}, "all_reduce leaves the sum: the hook divides, DDP does not"),
        Mistake(
            "nothing sent",
            {"dist.all_reduce(compressed, async_op=True)": "torch.futures.Future()"}
            | {f"return {REQUEST}": "request.set_result(compressed.to(bucket.buffer()))\n        return request"},
            "each rank keeps its own gradients, and no error says so",
        ),
        Mistake("sends float32", {".half()": ".clone()"}, "the mean is right, but no byte is saved"),
        Mistake("divides twice", {".div_(size)": ".div_(size).div_(size)"}),
        Mistake(
            "divides as float16",
            {".half()": ".half().div_(size)", "value()[0]).div_(size)": "value()[0])"},
            "a quotient of float16 is rounded again",
        ),
        Mistake(
            "waits in the hook",
            {"        def decompress": "        request.wait()\n\n        def decompress"},
            "backward waits until the bucket has come back",
        ),
    ),
)


def cases(rank: int, size: int, seed: int) -> Cases:
    """A weight's gradient is 10**rank, on rank 0 what bfloat16 cannot hold, and a little more, less than float16 can
    tell; a bias's is 1. The mean on 3 ranks is no number of float16."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    for about, width in (("one bucket", 1), ("several buckets", 300)):
        model, hooks = DistributedDataParallel(nn.Linear(4, width), bucket_cap_mb=0.001), list[str]()
        model.register_comm_hook = functools.partial(register, model.register_comm_hook, hooks)
        shares = [10**other if other else 2 + 2**-7 for other in range(size)]
        yield Case(
            about,
            (model, torch.full((1, 4), shares[rank] * (1 + 2**-12))),
            held=lambda model=model, hooks=hooks: {
                "hooks that waited": len(hooks),
                "bytes of an element": max([2, *WIDTHS]),
                "grad": {name: param.grad for name, param in model.module.named_parameters()},
            },
            expected={
                "hooks that waited": 0,
                "bytes of an element": 2,
                "grad": {"weight": torch.full((width, 4), sum(shares) / size), "bias": torch.ones(width)},
            },
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
