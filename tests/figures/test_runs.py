"""The recorded runs that pages play: a run of today is what was recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from playground.explain.hang.diagnosis import UNANSWERED, UNSHARED
from playground.explain.hang.states import Kind
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import MAIN, Event, Recording
from playground.figures import runs

QUICK = ("failures board",)
"""The others are for `make stress`."""
FIXES = [
    *(re.escape(kind.cure) for kind in Kind),
    *(re.sub(r"\\{\w+\\}", ".*", re.escape(words)) for words in (UNANSWERED, UNSHARED)),
]
"""Patterns of what a diagnosis of today says about how to fix it."""


def outlines(recording: Recording) -> list[list[tuple[object, ...]]]:
    """What the main thread of each rank does, in order, without times."""

    def outline(event: Event) -> tuple[object, ...]:
        return event.kind, event.name, event.peer, event.nbytes, event.shape, event.group

    return [
        [outline(event) for event in rank.events if event.lane == MAIN] for rank in recording.ranks
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.stress] * (name not in QUICK))
        for name in (*runs.PLAYED, "failures board")
    ],
)
def test_a_run_of_today_is_the_recorded_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operations, sizes and peers; what ranks hold, but for rounding."""
    recorded = runs.find_run(name)
    assert recorded
    assert any(recorded.events())
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    again = read_recording(runs.record(name))
    assert outlines(again) == outlines(recorded)
    for one, other in zip(again.events(), recorded.events(), strict=True):
        if name == "checkpoint board":
            break  # its values are bytes of objects, the name of a temporary folder among them
        if one.values is not None and other.values is not None and one.lane == MAIN:
            assert one.values == pytest.approx(other.values, rel=1e-3, abs=1e-6), one


def test_the_fix_that_a_page_tells_is_one_of_today() -> None:
    found = 0
    for name in runs.FAILURES:
        if (recording := runs.find_run(name)) and (standstill := recording.standstill):
            found += 1
            assert any(re.fullmatch(each, standstill.cure) for each in FIXES), (
                f"{name}: record it again: {standstill.cure}"
            )
    assert found > 10


def test_a_diagnosis_moves_with_its_lines() -> None:
    moved = {("calls.py", "122"): "125", ("calls.py", "9"): "10", ("other.py", "9"): "11"}
    said = "rank 0 is in send (calls.py:122) where rank 2 is in send (:9), rank 1 (other.py:9)"
    assert runs.move_lines(said, moved) == (
        "rank 0 is in send (calls.py:125) where rank 2 is in send (:10), rank 1 (other.py:11)"
    )
