"""What all ranks agree upon before they begin: settings, and that none of them has to refuse."""

from __future__ import annotations

import pytest
from fixtures import Worlds

from playground import UsageError
from playground.world.rendezvous.agreement import require_same_on_all_ranks


def bring_settings(rank: int, size: int) -> None:
    with pytest.raises(
        UsageError, match=r"^seed is 0 on rank 0 and 1 on rank 1: it must be the same$"
    ):
        require_same_on_all_ranks({"epochs": 3, "seed": rank})
    with pytest.raises(
        UsageError, match=r"^seed is not there on rank 0 and 1 on rank 1: it must be the same$"
    ):
        require_same_on_all_ranks({"epochs": 3} | ({"seed": 1} if rank else {}))
    require_same_on_all_ranks({"epochs": 3})


def test_settings_that_differ_are_refused_by_all_ranks(world: Worlds) -> None:
    world(2).run(bring_settings)
