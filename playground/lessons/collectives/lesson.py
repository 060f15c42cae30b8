"""Collectives: operations that every rank of a group takes part in, and what each leaves on every
rank.

    torchrun --nproc-per-node 4 lesson.py
    python -m playground collectives
    python -m playground collectives --only all_reduce --only groups -n 3

The tables show the run with as many ranks as they have rows. The first six are the tutorial's. The
last three do what all_gather, reduce_scatter and all_to_all do, on one tensor instead of a list.
Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist


def mine(rank: int) -> torch.Tensor:
    """The tensor a rank starts with: its number, counted from one."""
    return torch.full((1,), float(rank + 1))


def empty(size: int) -> list[torch.Tensor]:
    """Memory for one value from every rank."""
    return [torch.zeros(1) for _ in range(size)]


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor.item() for tensor in tensors]


def groups(rank: int, size: int) -> dict[str, object]:
    """`new_group` makes a smaller group. Every rank of the world must call it, in the same order,
    member or not.

    Here ranks 0 and 1 add up ones. A rank outside gets a handle with which it can do nothing: in
    that group it has the rank -1, and an operation on it changes nothing.

    | rank | before | after | rank_in_group |
    |------|--------|-------|---------------|
    | 0    | 1.0    | 2.0   | 0             |
    | 1    | 1.0    | 2.0   | 1             |
    | 2    | 1.0    | 1.0   | -1            |
    | 3    | 1.0    | 1.0   | -1            |
    """
    group = dist.new_group([0, 1][:size])
    tensor = torch.ones(1)
    before = tensor.item()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns a rank outside the group, which is the point here
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
    tensor = torch.zeros(1)
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
    """The root gets the sum. What the others' tensors hold afterwards is not defined, so only the
    root shows it.

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
    """The lists of all are added up, element by element; rank r gets element r. The first half of a
    ring all-reduce.

    | rank | before                   | after |
    |------|--------------------------|-------|
    | 0    | [1.0, 2.0, 3.0, 4.0]     | 10.0  |
    | 1    | [2.0, 4.0, 6.0, 8.0]     | 20.0  |
    | 2    | [3.0, 6.0, 9.0, 12.0]    | 30.0  |
    | 3    | [4.0, 8.0, 12.0, 16.0]   | 40.0  |
    """
    given = [mine(rank) * (r + 1) for r in range(size)]
    tensor = torch.zeros(1)
    dist.reduce_scatter(tensor, given, op=dist.ReduceOp.SUM)
    return {"before": [(rank + 1.0) * (r + 1) for r in range(size)], "after": tensor.item()}


def all_to_all(rank: int, size: int) -> dict[str, object]:
    """Every rank has a tensor for every rank: rank r's element s becomes rank s's element r, a
    transposition.

    | rank | before                   | after                    |
    |------|--------------------------|--------------------------|
    | 0    | [0.0, 1.0, 2.0, 3.0]     | [0.0, 10.0, 20.0, 30.0]  |
    | 1    | [10.0, 11.0, 12.0, 13.0] | [1.0, 11.0, 21.0, 31.0]  |
    | 2    | [20.0, 21.0, 22.0, 23.0] | [2.0, 12.0, 22.0, 32.0]  |
    | 3    | [30.0, 31.0, 32.0, 33.0] | [3.0, 13.0, 23.0, 33.0]  |
    """
    given = [torch.full((1,), 10.0 * rank + r) for r in range(size)]
    received = empty(size)
    dist.all_to_all(received, given)
    return {"before": values(given), "after": values(received)}


def all_gather_tensor(rank: int, size: int) -> dict[str, object]:
    """Every rank's shard, one after the other in one tensor.

    | rank | before     | after                                    |
    |------|------------|------------------------------------------|
    | 0    | [0.0, 0.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 1    | [1.0, 1.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 2    | [2.0, 2.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 3    | [3.0, 3.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    """
    shard = torch.tensor([rank, rank + 0.5])
    whole = torch.empty(size * len(shard))
    dist.all_gather_into_tensor(whole, shard)
    return {"before": shard.tolist(), "after": whole.tolist()}


def reduce_scatter_tensor(rank: int, size: int) -> dict[str, object]:
    """The tensors of all are added up; each rank gets its shard of the sum.

    | rank | before               | after  |
    |------|----------------------|--------|
    | 0    | [1.0, 2.0, 3.0, 4.0] | [10.0] |
    | 1    | [2.0, 4.0, 6.0, 8.0] | [20.0] |
    | 2    | [3.0, 6.0, 9.0, 12.0] | [30.0] |
    | 3    | [4.0, 8.0, 12.0, 16.0] | [40.0] |
    """
    whole = (rank + 1) * torch.arange(1.0, size + 1)
    shard = torch.empty(1)
    dist.reduce_scatter_tensor(shard, whole)
    return {"before": whole.tolist(), "after": shard.tolist()}


def all_to_all_single(rank: int, size: int) -> dict[str, object]:
    """Parts of different sizes: rank r sends r elements to every rank, and all say how many they
    expect from each.

    | rank | sent | after                          |
    |------|------|--------------------------------|
    | 0    | 0    | [1.0, 2.0, 2.0, 3.0, 3.0, 3.0] |
    | 1    | 4    | [1.0, 2.0, 2.0, 3.0, 3.0, 3.0] |
    | 2    | 8    | [1.0, 2.0, 2.0, 3.0, 3.0, 3.0] |
    | 3    | 12   | [1.0, 2.0, 2.0, 3.0, 3.0, 3.0] |
    """
    given = torch.full((size * rank,), float(rank))
    sizes_there = list(range(size))
    received = torch.empty(sum(sizes_there))
    dist.all_to_all_single(received, given, sizes_there, [rank] * size)
    return {"sent": len(given), "after": received.tolist()}


STEPS = (
    *(groups, scatter, gather, reduce, all_reduce, broadcast, all_gather),
    *(reduce_scatter, all_to_all, all_gather_tensor, reduce_scatter_tensor, all_to_all_single),
)  # fmt: skip


def print_steps(rank: int, world_size: int) -> None:
    """Run every step, and print what it leaves on this rank."""
    for step in STEPS:
        print(f"Rank {rank}, {step.__name__}: {step(rank, world_size)['after']}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
