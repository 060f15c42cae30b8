"""Remote calls, references and graphs in worlds of any size. (What the steps return: test_lessons.py.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from playground.lessons import LESSONS
from playground.lessons.rpc import lesson
from playground.runtime.rank.steps import run_steps
from playground.testing import World

Worlds = Callable[..., World]


@pytest.mark.stress
@pytest.mark.parametrize("size", [2, 4, 5])
def test_remote_calls_in_any_world(size: int, world: Worlds) -> None:
    steps = [LESSONS["rpc"].remote(step) for step in LESSONS["rpc"].steps]
    for rank, results in enumerate(world(size).run(run_steps, steps)):
        outcome = dict(zip(LESSONS["rpc"].steps, results, strict=True))
        right = (rank + 1) % size
        assert outcome["remote_call"]["after"] == outcome["by_torch"]["call"] == rank + 10.0 * right
        assert outcome["remote_reference"].items() >= {"owner": right, "held": 1, "left": 0}.items()
        autograd = outcome["distributed_autograd"]
        assert outcome["by_torch"]["gradients"] == [autograd["gradient_here"], autograd["gradient_there"]]
        assert (autograd["gradient_here"], autograd["gradient_there"]) == (autograd["there"], autograd["here"])
        assert outcome["beside_ddp"]["as_one_process"]
        assert outcome["by_torch"]["beside_ddp"]


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
