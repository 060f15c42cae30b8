"""Bytes that a rank sends, counted call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from playground.algorithms.traffic import Traffic
from playground.tap import observing
from playground.testing import World

SPLITS = {1: (1, 5), 2: (2, 3)}
"""Rows that each rank of the group has for its two ranks."""


def count_in_a_group(rank: int, size: int) -> tuple[dict[str, int], float]:
    """The calls of rank 1 and 2 in a group of their own, and the bytes that they send; a row has 8
    bytes."""
    group, traffic = dist.new_group([1, 2]), Traffic()
    if rank:
        own = SPLITS[rank]
        received = [SPLITS[other][rank - 1] for other in (1, 2)]
        rows = torch.zeros(sum(own), 2)
        arrived = torch.zeros(sum(received), 2)
        total = torch.zeros(2)
        with observing(traffic):
            dist.all_to_all_single(arrived, rows, received, [*own], group=group)
            dist.all_reduce(total, group=group)
            dist.send(total, 2, group=group) if rank == 1 else dist.recv(total, 1, group=group)
    dist.barrier()
    return dict(traffic.calls), traffic.sent


def test_what_stays_on_a_rank_is_not_sent(world: Callable[..., World]) -> None:
    """Of an uneven all_to_all the rows for others, of an all_reduce 2 (N - 1) / N of the tensor, of
    a message all."""
    outside, first, second = world(3).run(count_in_a_group)
    assert outside == ({}, 0.0)
    assert first == (
        {"all_to_all_single": 1, "all_reduce": 1, "send": 1},
        pytest.approx(5 * 8 + 8 + 8),
    )
    assert second[1] == pytest.approx(2 * 8 + 8)


def count_each(rank: int, size: int) -> dict[str, float]:
    """The bytes that this rank sends in each collective of 12 numbers of float64, from or to the
    last rank."""
    whole, root, sent = torch.zeros(12, dtype=torch.float64), size - 1, {}
    shards = [*whole.chunk(size)]
    is_root = rank == root
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shards[0].clone(), whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shards[0].clone()),
        "all_to_all": lambda: dist.all_to_all([*map(torch.clone, shards)], shards),
        "broadcast": lambda: dist.broadcast(whole, root),
        "reduce": lambda: dist.reduce(whole, root),
        "gather": lambda: dist.gather(shards[0].clone(), shards if is_root else None, root),
        "scatter": lambda: dist.scatter(shards[0].clone(), shards if is_root else None, root),
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        with observing(traffic := Traffic()):
            call()
        sent[name] = traffic.sent
    return sent


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_collective_is_counted_by_the_formula_of_its_algorithm(
    size: int, world: Callable[..., World]
) -> None:
    whole, shard = 96.0, 96.0 / size
    every = dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), shard * (size - 1))
    every |= {"all_reduce": 2 * shard * (size - 1), "barrier": 0.0}
    for rank, sent in enumerate(world(size).run(count_each)):
        is_root, is_last = rank == size - 1, rank == (size - 2) % size  # in the ring
        rooted = {
            "broadcast": 0.0 if is_last else whole,
            "reduce": 0.0 if is_root else whole,
            "gather": 0.0 if is_root else shard,
            "scatter": shard * (size - 1) if is_root else 0.0,
        }
        assert sent == pytest.approx(every | rooted), f"rank {rank}"
