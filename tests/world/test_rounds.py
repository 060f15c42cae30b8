"""Which line is due, and in which order."""

from __future__ import annotations

import pytest
from set_clock import Clock

from playground.world.launcher import rounds
from playground.world.launcher.rounds import HOLD, Rounds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


ALL = {0, 1, 2}


def test_lines_appear_when_all_ranks_have_as_many(clock: Clock) -> None:
    lines = Rounds[str](3)
    for rank, line in ((2, "a2"), (2, "b2"), (0, "a0"), (0, "b0"), (0, "c0")):
        lines.add(rank, line)
        assert lines.take(ALL) == []
    lines.add(1, "a1")
    assert lines.take(ALL) == [(0, "a0"), (1, "a1"), (2, "a2")]
    lines.add(1, "b1")
    lines.add(1, "c1")
    assert lines.take(ALL) == [(0, "b0"), (1, "b1"), (2, "b2")]


def test_a_line_waits_half_a_second(clock: Clock) -> None:
    lines = Rounds[str](3)
    lines.add(2, "a2")
    clock.now += 0.4
    lines.add(1, "a1")
    lines.add(2, "b2")
    assert lines.take(ALL) == []
    assert lines.seconds_left == pytest.approx(HOLD - 0.4)
    clock.now += lines.seconds_left
    assert lines.take(ALL) == [(2, "a2")]
    lines.add(0, "a0")  # of a round that has begun to appear: nothing is left to wait for
    assert lines.take(ALL) == [(0, "a0"), (1, "a1")]
    clock.now += HOLD
    assert lines.take(ALL) == [(2, "b2")]
    assert lines.seconds_left == float("inf")


def test_no_line_waits_for_a_rank_that_has_ended(clock: Clock) -> None:
    lines = Rounds[str](3)
    for rank in range(2):
        lines.add(rank, f"a{rank}")
        lines.add(rank, f"b{rank}")
    assert lines.take({0, 1}) == [(0, "a0"), (1, "a1"), (0, "b0"), (1, "b1")]
    lines.add(1, "c1")
    assert lines.take({0, 1}) == []
    lines.add(1, "d1")
    assert lines.take(set()) == [(1, "c1"), (1, "d1")]


def test_one_rank_can_be_let_go(clock: Clock) -> None:
    lines = Rounds[str](2)
    lines.add(1, "a1")
    lines.add(1, "b1")
    assert lines.take_of(1) == ["a1", "b1"]
    lines.add(0, "a0")
    assert lines.take({0, 1}) == [(0, "a0")]
