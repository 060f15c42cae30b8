"""Bytes that a rank sends, counted call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from playground.runtime.tap import observing
from playground.testing import World
from playground.training.traffic import Traffic

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
