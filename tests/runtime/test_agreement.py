"""What all ranks agree upon before they begin: settings, and that none of them has to refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures import Worlds

from playground import UsageError
from playground.runtime.rendezvous.agreement import refuse_together, require_same_on_all_ranks


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


def refuse(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=r"^there is no folder$"), refuse_together():
        look_for_a_folder(rank)


def look_for_a_folder(rank: int) -> None:
    if rank == 1:
        raise UsageError("there is no folder")


@pytest.mark.parametrize("fn", [bring_settings, refuse])
def test_ranks_refuse_together(fn: Callable[..., None], world: Worlds) -> None:
    world(2).run(fn)
