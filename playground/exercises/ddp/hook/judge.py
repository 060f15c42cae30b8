"""A communication hook. What did not travel as float16 has digits that float16 lacks."""

from __future__ import annotations

from collections.abc import Iterator

from playground.exercises.cases import Case
from playground.exercises.exercise import Exercise, Mistake

REQUEST = "request.get_future().then(decompress)"
EXERCISE = Exercise(
    module=__name__,
    number=27,
    worlds=(2, 3, 1, 4),
    operations=("all_reduce",),
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
    ),
)


def cases(rank: int, size: int, seed: int) -> Iterator[Case]:
    """A weight's gradient is `size * 10**rank` and a little more, less than float16 can tell; a bias's is 1."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    for about, width in (("one bucket", 1), ("several buckets", 300)):
        model = DistributedDataParallel(nn.Linear(4, width), bucket_cap_mb=0.001)
        mean = float(sum(10**other for other in range(size)))
        yield Case(
            about,
            (model, torch.full((1, 4), size * 10**rank * (1 + 2**-12))),
            held=lambda model=model: {name: param.grad for name, param in model.module.named_parameters()},
            expected={"weight": torch.full((width, 4), mean), "bias": torch.ones(width)},
        )
