"""An all-reduce made of smaller ones is an all-reduce: the exact sum for any number of ranks, the same bits on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from playground.testing import World
from playground.training.hierarchical import HierarchicalAllReduce, groups_of, make_groups

Worlds = Callable[..., World]


def who_talks_to_whom(rank: int, size: int, group_size: int) -> dict[str, Any]:
    """The groups of this rank, what they add up to, and whether they are made only once."""
    groups = make_groups(group_size)
    sizes: list[int] = []

    def recording(tensor: torch.Tensor, *, group: Any, **options: Any) -> None:
        sizes.append(dist.get_world_size(group))
        dist.all_reduce(tensor, group=group, **options)

    all_reduce, tensor = HierarchicalAllReduce(recording), torch.tensor([2**rank])
    all_reduce.groups = groups
    all_reduce(tensor)
    once = groups_of(dist.group.WORLD) is groups_of(dist.group.WORLD)
    return {"sum": tensor.item(), "leader": groups.leader, "sizes": sizes, "once": once}


@pytest.mark.parametrize(
    ("size", "group_size", "leaders", "sizes"),
    [
        (5, 2, [0, 0, 2, 2, 4], [[2, 3], [2], [2, 3], [2], [1, 3]]),
        (4, 3, [0, 0, 0, 3], [[3, 2], [3], [3], [1, 2]]),
        (2, 4, [0, 0], [[2, 1], [2]]),
    ],
)
def test_who_talks_to_whom(
    size: int, group_size: int, leaders: list[int], sizes: list[list[int]], world: Worlds
) -> None:
    results = world(size).run(who_talks_to_whom, group_size)
    assert [result["leader"] for result in results] == leaders
    assert [result["sizes"] for result in results] == sizes
    assert {(result["sum"], result["once"]) for result in results} == {(2**size - 1, True)}
