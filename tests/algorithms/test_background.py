"""Asynchronous all-reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import several_at_once

from playground.algorithms import load_all_reduce
from playground.algorithms.messages import observed
from playground.testing import World

Worlds = Callable[..., World]


@pytest.mark.parametrize("name", ["ring", "auto", "binary-tree"])
def test_asynchronous_all_reduces_take_turns(name: str, world: Worlds) -> None:
    for result in world(3, timeout=20).run(several_at_once, name):
        assert result == [*(6.0 + 3 * length for length in (1, 5, 100_000, 3)), 6.0]


def failure_at_wait(rank: int, size: int) -> str:
    def fail(*_: Any) -> None:
        raise ValueError("no more")

    with observed(fail):
        work: Any = load_all_reduce("ring")(torch.ones(10), async_op=True)
        try:
            work.wait()
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_an_asynchronous_all_reduce_fails_where_it_is_waited_for(world: Worlds) -> None:
    assert world(2).run(failure_at_wait) == ["no more"] * 2
