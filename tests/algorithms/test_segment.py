"""Memory that ranks of one host share: all of them do or none does, and whoever waits there for a
lost rank hears of it."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from forked_ranks import run_forked

from playground.algorithms import load_all_reduce, segment as memory, shared_memory
from playground.algorithms.messages import segment_of
from playground.algorithms.segment import MOST_RANKS, SLOT, Segment
from playground.base.lost_ranks import end_waits


def without_memory(rank: int, size: int, refused: int) -> tuple[float, object]:
    """Sum, where the system refuses memory to one rank."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == refused:
            patch.setattr(os, "posix_fallocate", refuse)
            patch.setattr(memory, "attach", refuse)
        group, tensor = dist.new_group(range(size)), torch.ones(3)
        load_all_reduce("shared-memory")(tensor, group=group)
    return tensor[0].item(), segment_of(group, torch.device("cpu"))


@pytest.mark.parametrize("refused", [1, pytest.param(0, marks=pytest.mark.stress)])
def test_all_ranks_share_memory_or_none_does(
    refused: int, world: Worlds, capfd: pytest.CaptureFixture[str]
) -> None:
    results = world(3, fresh=True).run(without_memory, refused)
    assert [total for total, _ in results] == [3.0] * 3
    assert all(isinstance(found, str) for _, found in results)
    assert "no memory" in results[refused][1]
    assert capfd.readouterr().err.count("the ranks share no memory (") == 1


def test_too_many_ranks_share_none() -> None:
    ranks = range(MOST_RANKS + 1)
    found = memory.open_segment(
        0, [ranks], ranks, lambda values: [tuple(values)] * len(ranks), lambda: 1.0
    )
    assert found == f"{MOST_RANKS + 1} ranks are more than {MOST_RANKS}"


def reduce_until(segment: Segment, doomed: int, number: int, after: float, elements: int) -> str:
    """Reduce until something happens. Rank `doomed` gets a signal at some moment."""
    if segment.rank == doomed:
        if number:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
        else:

            def fail(*_: Any) -> None:
                raise SystemExit(3)

            signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, after)
    tensor = torch.zeros(elements)
    while True:
        shared_memory.all_reduce(segment, tensor, dist.ReduceOp.RedOpType.SUM)


def moments(count: int) -> list[tuple[int, int, int, float, int]]:
    """Ranks, which of them is lost, by which signal (0: it fails), after how many seconds, and
    elements."""
    draw, numbers = random.Random(2026), [signal.SIGKILL, signal.SIGSTOP, 0, signal.SIGKILL]
    return [
        (
            size,
            draw.randrange(size),
            numbers[k % 4],
            draw.uniform(0.001, 0.05),
            draw.choice([10, 20_000, SLOT]),
        )
        for k, size in zip(range(count), [2, 3, 4] * count, strict=False)
    ]


def lose_some(rank: int, world_size: int, count: int) -> list[str]:
    """Descriptions of what went wrong when ranks were lost inside a call."""
    wrong = []
    for case in moments(count):
        size, doomed, number, after, elements = case
        timeout = 0.5 if number == signal.SIGSTOP else 30.0
        results = run_forked(size, reduce_until, timeout, doomed, number, after, elements)
        said = [str(result) for other, (result, _) in enumerate(results) if other != doomed]
        words = (
            f"rank.* {doomed}.* did not come"
            if number == signal.SIGSTOP
            else f"rank {doomed} has (ended|left)"
        )
        first = [each for each in said if re.search(words, each)]
        if not first or not all(each in first or "has left a call" in each for each in said):
            wrong.append(f"{case}: {results}")
    return wrong


@pytest.mark.parametrize("count", [3, pytest.param(300, marks=pytest.mark.stress)])
def test_whoever_waits_for_a_lost_rank_hears_of_it(count: int, world: Worlds) -> None:
    """Killed, stopped or gone inside a call, at any moment."""
    assert world(1, timeout=600.0).run(lose_some, count) == [[]]


def wait_or_hear(segment: Segment) -> str:
    """Rank 0 waits for rank 1, which hears of another rank's loss."""
    if segment.rank == 1:
        time.sleep(0.1)
        end_waits()
        time.sleep(0.5)
        return ""
    with pytest.raises(RuntimeError) as error:
        segment.run(Segment.meet)
    return str(error.value)


def hear_of_a_loss(rank: int, world_size: int) -> str:
    [(said, _), _] = run_forked(2, wait_or_hear, 30.0)
    return str(said)


def test_whoever_waits_for_a_rank_that_hears_of_a_loss_is_woken(world: Worlds) -> None:
    [said] = world(1).run(hear_of_a_loss)
    assert "rank 1 has left a call" in said


def meet_and_leave(segment: Segment, number: int) -> int:
    """Meet often, and leave at once, however late others are."""
    for _ in range(number):
        if segment.rank == number % segment.size:
            time.sleep(0.001)
        segment.meet()
    os._exit(number)


def leave_often(rank: int, world_size: int, count: int) -> list[list[tuple[Any, int | None]]]:
    return [run_forked(2 + k % 3, meet_and_leave, 30.0, 1 + k % 5) for k in range(count)]


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.stress)])
def test_a_peer_that_leaves_when_all_have_come_is_no_loss(count: int, world: Worlds) -> None:
    for k, results in enumerate(world(1, timeout=600.0, fresh=True).run(leave_often, count)[0]):
        assert results == [(None, 1 + k % 5)] * (2 + k % 3)
