"""Ranks are killed, training goes on, and the last snapshots have the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import by_hand

from playground.lessons.elastic.page import Witness, draw_kills
from playground.runtime import PlaygroundError, RankFailed

Run = Callable[..., Any]


@pytest.fixture
def elastic(run_cli: Run, data_dir: Path) -> Run:
    """The command, on a few digits."""

    def run(*words: Any) -> Any:
        return run_cli("elastic", "--dataset", "digits", "--data-dir", data_dir, "--limit", 600, *words)

    return run


@pytest.mark.parametrize(("way", "size"), [("ddp", 3), pytest.param("sgd", 2, marks=pytest.mark.stress)])
def test_kills_leave_no_trace(way: str, size: int, elastic: Run) -> None:
    shown = elastic("--way", way, "-n", size, "--kills", 2, "--snapshot-every", 1, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert document["comparison"]["differing"] == 0
    assert document["comparison"]["nbytes"] > size * 5056 + 2 * 87_360  # random numbers, parameters and momentum
    assert len(document["recoveries"]) == 2
    for recovery in document["recoveries"]:
        assert recovery["failure"].endswith(f"of {size} was killed by SIGKILL")
        assert recovery["killed_after"] - 2 <= recovery["resumed_after"] < recovery["killed_after"]


def test_a_failure_that_was_not_drawn_ends_it() -> None:
    witness = Witness()
    witness.note_failure(RankFailed(0, 2, "is out of reach"), 1)
    with pytest.raises(PlaygroundError, match="out of reach: that was none of the kills"):
        witness.hear(0, {"stepped": 1})


def test_word_of_the_next_kill_may_come_first() -> None:
    """Before that of the step which another rank took before it: each rank has a pipe of its own."""
    witness = Witness()
    for killed_after, resumed_after in ((3, 0), (4, 2)):
        witness.hear(1, {"killed": killed_after})
        if killed_after == 4:
            witness.hear(0, {"stepped": 1})
        witness.note_failure(RankFailed(1, 2, "was killed by SIGKILL"), 1)
        if resumed_after:
            witness.hear(0, {"resumed": {"total": resumed_after}})
    witness.hear(0, {"stepped": 3})
    assert [(each["killed_after"], each["resumed_after"]) for each in witness.recoveries] == [(3, 0), (4, 2)]


def test_more_kills_than_steps_are_refused(elastic: Run) -> None:
    shown = elastic("--kills", 5)
    assert (shown.code, shown.out) == (2, "")
    assert "--kills 5 in a training of 5 steps: choose fewer" in shown.err


def test_a_world_that_is_joined_is_not_killed(elastic: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_hand(0, 1, "29500").items():
        monkeypatch.setenv(name, value)
    shown = elastic()
    assert (shown.code, shown.out) == (2, "")
    assert "elastic kills ranks and starts new ones" in shown.err


def test_kills_come_one_after_the_other() -> None:
    kills = draw_kills(9, 3, 10, seed=1)
    assert [step for _, step in kills] == list(range(1, 10))
    assert {rank for rank, _ in kills} <= {0, 1, 2}
    assert draw_kills(2, 3, 10, seed=1) == draw_kills(2, 3, 10, seed=1)
