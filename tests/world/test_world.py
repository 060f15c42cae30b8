"""How ranks leave a world: only fresh ones do so when their function has returned."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from fixtures import Worlds

from playground.world import RankFailed
from playground.world.backends import BACKENDS


def leave_hand_in_hand(rank: int, size: int) -> int:
    """As nccl's communicators do: none is destroyed before all the others are being destroyed
    too."""
    BACKENDS["gloo"].synchronize = dist.barrier  # type: ignore[method-assign]
    return rank


def test_all_ranks_leave_together(world: Worlds) -> None:
    assert world(3, fresh=True).run(leave_hand_in_hand) == [0, 1, 2]


def ask_the_store_when_rank_0_has_left(rank: int, size: int) -> int:
    """As nccl's threads do: a rank that is slow to leave still asks the store, which rank 0
    serves."""
    store = dist.distributed_c10d._get_default_store()

    def synchronize() -> None:
        if rank > 0:
            time.sleep(0.2)
            store.set(f"asked by {rank}", "")
            assert store.check([f"asked by {rank}"])

    BACKENDS["gloo"].synchronize = synchronize  # type: ignore[method-assign]
    return rank


def test_rank_0_keeps_the_store_until_the_others_have_left(world: Worlds) -> None:
    assert world(3, fresh=True).run(ask_the_store_when_rank_0_has_left) == [0, 1, 2]


def fail_to_leave(rank: int, size: int) -> int:
    def synchronize() -> None:
        if rank == 2:
            raise SystemExit(9)

    BACKENDS["gloo"].synchronize = synchronize  # type: ignore[method-assign]
    return rank


def test_a_rank_that_cannot_leave_is_named(world: Worlds) -> None:
    with pytest.raises(RankFailed, match=r"rank 2 of 3 .*SystemExit: 9"):
        world(3, fresh=True).run(fail_to_leave)
