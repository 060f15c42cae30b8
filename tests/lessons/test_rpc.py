"""Remote calls, references and graphs in worlds of any size. (What the steps return: test_lessons.py.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from playground.lessons.rpc import lesson
from playground.testing import World

Worlds = Callable[..., World]


def test_one_rank_alone_is_refused(run_cli: Callable[..., Any]) -> None:
    shown = run_cli("rpc", "-n", 1)
    assert (shown.code, shown.out) == (2, "")
    assert len(shown.err.splitlines()) == 1


def meet_without_an_address(rank: int, size: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR")
        number = lesson.by_torch(rank, size)["call"]
    assert isinstance(number, float)
    return number


def test_torch_s_rpc_meets_where_the_world_has_met(world: Worlds) -> None:
    """At a file, for instance: no address is needed."""
    assert world(2).run(meet_without_an_address) == [10.0, 1.0]
