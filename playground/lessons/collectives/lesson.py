"""Collectives: operations that every rank of a group takes part in, and what each leaves on every rank.

    python -m playground collectives
    python -m playground collectives --only all_reduce --only groups -n 3

The tables show the run with as many ranks as they have rows. What a backend cannot do is found out by trying it.
Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import reduce as fold
from operator import and_, or_, xor
from typing import Any

import torch
import torch.distributed as dist

from playground.runtime import device
from playground.runtime.backends import refusal


def mine(rank: int) -> torch.Tensor:
    """The tensor a rank starts with: its number, counted from one."""
    return torch.full((1,), float(rank + 1), device=device())


def empty(size: int) -> list[torch.Tensor]:
    """Memory for one value from every rank."""
    return [torch.zeros(1, device=device()) for _ in range(size)]


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor.item() for tensor in tensors]


def groups(rank: int, size: int) -> dict[str, object]:
    """`new_group` makes a smaller group. Every rank of the world must call it, in the same order, member or not.

    Here ranks 0 and 1 add up ones. A rank outside gets a handle with which it can do nothing: in that group it has the
    rank -1, and an operation on it changes nothing.

    | rank | before | after | rank_in_group |
    |------|--------|-------|---------------|
    | 0    | 1.0    | 2.0   | 0             |
    | 1    | 1.0    | 2.0   | 1             |
    | 2    | 1.0    | 1.0   | -1            |
    | 3    | 1.0    | 1.0   | -1            |
    """
    group = dist.new_group([0, 1][:size])
    tensor = torch.ones(1, device=device())
    before = tensor.item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns a rank outside the group, which is the point here
        dist.all_reduce(tensor, group=group)
    return {"before": before, "after": tensor.item(), "rank_in_group": dist.get_rank(group)}


def scatter(rank: int, size: int) -> dict[str, object]:
    """The root deals out a list, one tensor to each rank.

    | rank | before               | after |
    |------|----------------------|-------|
    | 0    | [1.0, 2.0, 3.0, 4.0] | 1.0   |
    | 1    | None                 | 2.0   |
    | 2    | None                 | 3.0   |
    | 3    | None                 | 4.0   |
    """
    dealt = [mine(r) for r in range(size)] if rank == 0 else None
    tensor = torch.zeros(1, device=device())
    dist.scatter(tensor, dealt, src=0)
    return {"before": values(dealt) if dealt else None, "after": tensor.item()}


def gather(rank: int, size: int) -> dict[str, object]:
    """The root collects one tensor from each rank.

    | rank | before | after                |
    |------|--------|----------------------|
    | 0    | 1.0    | [1.0, 2.0, 3.0, 4.0] |
    | 1    | 2.0    | None                 |
    | 2    | 3.0    | None                 |
    | 3    | 4.0    | None                 |
    """
    collected = empty(size) if rank == 0 else None
    dist.gather(mine(rank), collected, dst=0)
    return {"before": mine(rank).item(), "after": values(collected) if collected else None}


def reduce(rank: int, size: int) -> dict[str, object]:
    """The root gets the sum. What the others' tensors hold afterwards is not defined, so only the root shows it.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 1.0    | 10.0  |
    | 1    | 2.0    | None  |
    | 2    | 3.0    | None  |
    | 3    | 4.0    | None  |
    """
    tensor = mine(rank)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return {"before": mine(rank).item(), "after": tensor.item() if rank == 0 else None}


def all_reduce(rank: int, size: int) -> dict[str, object]:
    """Every rank gets the sum: the operation that averages gradients.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 1.0    | 10.0  |
    | 1    | 2.0    | 10.0  |
    | 2    | 3.0    | 10.0  |
    | 3    | 4.0    | 10.0  |
    """
    tensor = mine(rank)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return {"before": mine(rank).item(), "after": tensor.item()}


def broadcast(rank: int, size: int) -> dict[str, object]:
    """Every rank gets the root's tensor.

    | rank | before | after |
    |------|--------|-------|
    | 0    | 1.0    | 1.0   |
    | 1    | 2.0    | 1.0   |
    | 2    | 3.0    | 1.0   |
    | 3    | 4.0    | 1.0   |
    """
    tensor = mine(rank)
    dist.broadcast(tensor, src=0)
    return {"before": mine(rank).item(), "after": tensor.item()}


def all_gather(rank: int, size: int) -> dict[str, object]:
    """Every rank collects one tensor from each rank.

    | rank | before | after                |
    |------|--------|----------------------|
    | 0    | 1.0    | [1.0, 2.0, 3.0, 4.0] |
    | 1    | 2.0    | [1.0, 2.0, 3.0, 4.0] |
    | 2    | 3.0    | [1.0, 2.0, 3.0, 4.0] |
    | 3    | 4.0    | [1.0, 2.0, 3.0, 4.0] |
    """
    collected = empty(size)
    dist.all_gather(collected, mine(rank))
    return {"before": mine(rank).item(), "after": values(collected)}


def reduce_scatter(rank: int, size: int) -> dict[str, object]:
    """The lists of all are added up, element by element; rank r gets element r. The first half of a ring all-reduce.

    | rank | before                   | after |
    |------|--------------------------|-------|
    | 0    | [1.0, 2.0, 3.0, 4.0]     | 10.0  |
    | 1    | [2.0, 4.0, 6.0, 8.0]     | 20.0  |
    | 2    | [3.0, 6.0, 9.0, 12.0]    | 30.0  |
    | 3    | [4.0, 8.0, 12.0, 16.0]   | 40.0  |
    """
    given = [mine(rank) * (r + 1) for r in range(size)]
    tensor = torch.zeros(1, device=device())
    dist.reduce_scatter(tensor, given, op=dist.ReduceOp.SUM)
    return {"before": [(rank + 1.0) * (r + 1) for r in range(size)], "after": tensor.item()}


def all_to_all(rank: int, size: int) -> dict[str, object]:
    """Every rank has a tensor for every rank: rank r's element s becomes rank s's element r, a transposition.

    | rank | before                   | after                    |
    |------|--------------------------|--------------------------|
    | 0    | [0.0, 1.0, 2.0, 3.0]     | [0.0, 10.0, 20.0, 30.0]  |
    | 1    | [10.0, 11.0, 12.0, 13.0] | [1.0, 11.0, 21.0, 31.0]  |
    | 2    | [20.0, 21.0, 22.0, 23.0] | [2.0, 12.0, 22.0, 32.0]  |
    | 3    | [30.0, 31.0, 32.0, 33.0] | [3.0, 13.0, 23.0, 33.0]  |
    """
    given = [torch.full((1,), 10.0 * rank + r, device=device()) for r in range(size)]
    received = empty(size)
    dist.all_to_all(received, given)
    return {"before": values(given), "after": values(received)}


def barrier(rank: int, size: int) -> dict[str, object]:
    """No rank continues before all have arrived. `arrived` is how many had when this rank was let through.

    Each rank signs a book (a key of the store) before the barrier and reads it after, so a barrier that lets a rank
    through early would show.

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
    """A barrier that, after a timeout, names the ranks that did not come. For debugging; gloo has it.

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
    """The object forms, of scatter and gather too, move what pickles; they are slow, and unpickle what a peer sends.

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
    """Every reduce operation on 1, 2, 3, …: the value, or that the backend refuses it, or that what it gave is wrong.

    The bitwise ones want integers. PREMUL_SUM multiplies by a factor (here 2) before it adds. A value is checked
    against the definition: gloo's AVG is refused in some versions and has been wrong in others
    (pytorch/pytorch#162338).
    """
    outcomes: dict[str, object] = {}
    for name, (dtype, definition) in REDUCTIONS.items():
        tensor = torch.tensor(rank + 1, dtype=dtype, device=device())
        op = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
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
