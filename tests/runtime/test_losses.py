"""launch(expendable=...): a rank that dies is reported, and the others go on, if they can."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import misbehave

import playground
from playground import RankFailed, UsageError

launch = partial(playground.launch, expendable=[1, 2])
KILLED = "was killed by SIGKILL"


def talk_around(rank: int, size: int, how: str, culprits: list[int]) -> list[float]:
    """The culprits go wrong. Rank 0 and the last one send each other a number, many times, by gloo's send and recv."""
    dist.barrier()
    if rank in culprits:
        misbehave(how)
    number, other = torch.zeros(1), size - 1 - rank
    for _ in range(5 if other not in (*culprits, rank) else 0):
        time.sleep(0.02)
        if rank == 0:
            dist.send(number + 1, other)
        dist.recv(number, other)
        if rank > 0:
            dist.send(number + 1, other)
    return number.tolist()


def pid(rank: int, size: int) -> int:
    return os.getpid()


def lost_in(fn: Callable[..., Any], size: int, *args: Any, **more: Any) -> tuple[list[Any], list[str]]:
    """(what the ranks returned, what was told of those that were lost)."""
    told: list[str] = []
    return launch(fn, size, args=args, on_loss=lambda failure: told.append(failure.headline), **more), told


def test_the_others_go_on() -> None:
    results, told = lost_in(talk_around, 4, "kill", [1, 2])
    assert results == [[10.0], None, None, [9.0]]
    assert sorted(told) == [f"rank {rank} of 4 {KILLED}" for rank in (1, 2)]


def test_nobody_else_may() -> None:
    told: list[RankFailed] = []
    for culprit in (0, 3):
        with pytest.raises(RankFailed, match=f"^rank {culprit} of 4 {KILLED}"):
            launch(talk_around, 4, args=("kill", [culprit]), on_loss=told.append)
    assert not told


def need_all(rank: int, size: int) -> None:
    """Everybody is needed, until one dies."""
    if rank == 1:
        misbehave("kill")
    dist.barrier()


def test_whoever_cannot_go_on_without_the_lost_ends_all() -> None:
    with pytest.raises(RankFailed, match=f"^rank 1 of 3 {KILLED}"):
        launch(need_all, 3)


def test_by_default_a_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "playground"):
        launch(talk_around, 3, args=("kill", [1]))
    assert [record.getMessage() for record in caplog.records] == [f"rank 1 of 3 {KILLED}; the others go on"]


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_that_cannot_be_expendable_are_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"^expendable rank {rank} of 3: use ranks 1 to 2"):
        playground.launch(pid, 3, expendable=[rank])
