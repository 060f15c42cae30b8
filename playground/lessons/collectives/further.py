"""Collectives beside the six: barriers, objects, and every reduce operation. What a backend cannot
do is found out by trying it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce as fold
from operator import and_, or_, xor
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device
from playground.runtime.backends import refusal


def barrier(rank: int, size: int) -> dict[str, object]:
    """No rank continues before all have arrived. `arrived` is how many had when this rank was let
    through.

    Each rank signs a book (a key of the store) before the barrier and reads it after, so a barrier
    that lets a rank through early would show.

    | rank | before | arrived |
    |------|--------|---------|
    | 0    | 0      | 4       |
    | 1    | 0      | 4       |
    | 2    | 0      | 4       |
    | 3    | 0      | 4       |
    """
    book = dist.distributed_c10d._get_default_store()
    book.add("signatures", 1)
    dist.barrier()
    return {"before": 0, "arrived": book.add("signatures", 0)}


def monitored_barrier(rank: int, size: int) -> dict[str, object]:
    """A barrier that, after a timeout, names the ranks that did not come. For debugging; gloo has
    it.

    | rank | before | after    |
    |------|--------|----------|
    | 0    | 'here' | 'passed' |
    | 1    | 'here' | 'passed' |
    | 2    | 'here' | 'passed' |
    | 3    | 'here' | 'passed' |
    """
    dist.monitored_barrier(wait_all_ranks=True)
    return {"before": "here", "after": "passed"}


def broadcast_object(rank: int, size: int) -> dict[str, object]:
    """The object forms, of scatter and gather too, move what pickles; they are slow, and unpickle
    what a peer sends.

    | rank | before      | after       |
    |------|-------------|-------------|
    | 0    | {'lr': 0.1} | {'lr': 0.1} |
    | 1    | None        | {'lr': 0.1} |
    | 2    | None        | {'lr': 0.1} |
    | 3    | None        | {'lr': 0.1} |
    """
    objects = [{"lr": 0.1} if rank == 0 else None]
    before = objects[0]
    dist.broadcast_object_list(objects, src=0)
    return {"before": before, "after": objects[0]}


def all_gather_object(rank: int, size: int) -> dict[str, object]:
    """Every rank collects any objects, of any size.

    | rank | before    | after                                           |
    |------|-----------|-------------------------------------------------|
    | 0    | []        | [[], [0], [0, 1], [0, 1, 2]] |
    | 1    | [0]       | [[], [0], [0, 1], [0, 1, 2]] |
    | 2    | [0, 1]    | [[], [0], [0, 1], [0, 1, 2]] |
    | 3    | [0, 1, 2] | [[], [0], [0, 1], [0, 1, 2]] |
    """
    collected: list[Any] = [None] * size
    dist.all_gather_object(collected, list(range(rank)))
    return {"before": list(range(rank)), "after": collected}


Numbers = list[int]
REDUCTIONS: dict[str, tuple[torch.dtype, Callable[[Numbers], float]]] = {
    "SUM": (torch.float32, sum),
    "PRODUCT": (torch.float64, lambda numbers: math.prod(numbers, start=1.0)),
    "MIN": (torch.float32, min),
    "MAX": (torch.float32, max),
    "AVG": (torch.float32, lambda numbers: sum(numbers) / len(numbers)),
    "PREMUL_SUM": (torch.float32, lambda numbers: 2 * sum(numbers)),
    "BAND": (torch.int64, lambda numbers: fold(and_, numbers)),
    "BOR": (torch.int64, lambda numbers: fold(or_, numbers)),
    "BXOR": (torch.int64, lambda numbers: fold(xor, numbers)),
}
"""Each reduce operation, the type it is shown on, and what it is by definition, in plain Python."""


def reduce_operations(rank: int, size: int) -> dict[str, object]:
    """Every reduce operation on 1, 2, 3, …: the value, or that the backend refuses it, or that what
    it gave is wrong.

    The bitwise ones want integers. PREMUL_SUM multiplies by a factor (here 2) before it adds. A
    value is checked against the definition: gloo's AVG is refused in some versions and has been
    wrong in others (pytorch/pytorch#162338).
    """
    outcomes: dict[str, object] = {}
    for name, (dtype, definition) in REDUCTIONS.items():
        tensor = torch.tensor(rank + 1, dtype=dtype, device=device())
        op = (
            dist._make_nccl_premul_sum(2.0)
            if name == "PREMUL_SUM"
            else getattr(dist.ReduceOp, name)
        )
        try:
            dist.all_reduce(tensor, op=op)
        except (RuntimeError, ValueError) as error:
            if not refusal(error):
                raise
            outcomes[name] = f"refused: {refusal(error)}"
            continue
        expected = definition(list(range(1, size + 1)))
        right = math.isclose(tensor.item(), expected, rel_tol=1e-6)
        outcomes[name] = tensor.item() if right else f"wrong: {tensor.item()} instead of {expected}"
    return {"before": rank + 1, "after": outcomes}
