"""collectives: which ranks wait for one that is late, as the chapter's table says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds

import playground

CHAPTER = Path(playground.__file__).parent / "lessons" / "collectives" / "README.md"
SIZE = 4
CALLS: dict[str, Callable[[int, torch.Tensor], object]] = {
    "barrier": lambda rank, tensor: dist.barrier(),
    "all_reduce": lambda rank, tensor: dist.all_reduce(tensor),
    "all_gather": lambda rank, tensor: dist.all_gather(received(tensor), tensor),
    "reduce_scatter": lambda rank, tensor: dist.reduce_scatter(tensor.clone(), received(tensor)),
    "all_to_all": lambda rank, tensor: dist.all_to_all(received(tensor), received(tensor)),
    "broadcast": lambda rank, tensor: dist.broadcast(tensor, src=0),
    "scatter": lambda rank, tensor: dist.scatter(
        tensor, received(tensor) if rank == 0 else None, src=0
    ),
    "gather": lambda rank, tensor: dist.gather(
        tensor, received(tensor) if rank == 0 else None, dst=0
    ),
}


def received(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for _ in range(SIZE)]


def read_table() -> dict[str, list[set[int]]]:
    """By operation: who waits for rank 0, for rank 1, …"""
    table = CHAPTER.read_text(encoding="utf-8").partition("rank 3 late |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split("|") for line in table.splitlines() if "`" in line]
    return {
        name: [{*map(int, cell.split())} for cell in cells]
        for names, *cells in rows
        for name in re.findall(r"`(\w+)", names)
    }


def wait_for_each(rank: int, size: int, name: str, waiting: list[set[int]]) -> list[bool]:
    """Be late, one rank after the other: until those have returned who do not wait. Returns, for
    this rank's turn, whether one of those that wait has returned, too."""
    store, early = dist.distributed_c10d._get_default_store(), []
    for late in range(size):
        returned = [f"{name}, {late} late: {other}" for other in range(size)]
        if rank == late:
            free = {*range(size)} - {late} - waiting[late]
            store.wait([returned[other] for other in free])
            early += [store.check([returned[other]]) for other in waiting[late]]
        CALLS[name](rank, torch.ones(1))
        store.set(returned[rank], "")
        dist.barrier()
    return early


def test_the_table_names_all_of_them() -> None:
    assert read_table().keys() == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_who_waits_for_whom(name: str, world: Worlds) -> None:
    waiting = read_table()[name]
    assert any(waiting)
    assert not any(map(any, world(SIZE).run(wait_for_each, name, waiting)))
