"""A recording as text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from recordings import Call, Receive, Wait, on_gpus, play, recording_of, ring, training
from widths import too_wide

from playground.base.untrusted import expect_text
from playground.explain.replay.record.recording import Recording, Standstill
from playground.explain.replay.render.text_report import recording_texts
from playground.ui.rendering import render


def text_of(recording: Recording) -> str:
    return render(recording_texts(recording), 80)


@pytest.mark.parametrize(
    "recording",
    [
        ring(8, 1000, straggler=2), training(3), play([[Call("barrier", 0)]] * 2), recording_of([[],
        []]),
        on_gpus(ring(4, straggler=2)),
    ],
)  # fmt: skip
def test_it_fits_a_terminal(recording: Recording) -> None:
    text = text_of(recording)
    assert too_wide(text) == []
    assert "left out" not in text
    assert text.startswith(f"playground all_reduce -n {recording.size}\n")


def test_a_straggler_is_named_with_its_line_but_nothing_is_derived_on_gpus() -> None:
    """A rank's waits end there when its work is issued."""
    text = text_of(ring(4, straggler=2))
    assert "rank 2 was busy for 19.9 ms: forward at lesson.py:11" in text
    assert "Not recorded" not in text
    text = " ".join(text_of(on_gpus(ring(4, straggler=2))).split())
    assert "Waits and what caused them: cannot be told on GPUs, where wait() returns once" in text
    assert not re.search("late sender|Longest wait|straggler", text)


def test_what_is_missing_is_said() -> None:
    recording = play([[Receive(1, 8), Wait()], []])
    ranks = (
        replace(recording.ranks[0], is_cut_off=True),
        replace(recording.ranks[1], dropped=1234),
    )
    text = text_of(replace(recording, ranks=ranks))
    assert "rank 1: no room for 1,234 events; rank 0: cut off" in text
    assert "1 message of which only one end is recorded, first rank 0's receive" in re.sub(
        r"\s+", " ", text
    )
    assert "Waits: none in a call" in text


def test_a_deadlock_is_told_as_it_was_when_it_ended_the_run() -> None:
    """Its table keeps its lines, and that the ranks did not come to their ends is no loss."""
    table = "rank  does           waits for\n0     all_reduce #0  1\n1     barrier #0     0"
    found = Standstill("deadlock: rank 0 is in all_reduce", "call the same", ((0, (1,)),))
    recording = play([[Receive(1, 8), Wait()], []])
    ranks = tuple(replace(each, is_cut_off=True) for each in recording.ranks)
    ended = expect_text(f"deadlock: rank 0 is in all_reduce\n{table}\ncall the same", lines=True)
    text = text_of(replace(recording, ranks=ranks, ended=ended, standstill=found))
    assert f"It failed: deadlock: rank 0 is in all_reduce\n{table}\ncall the same\n" in text
    assert "Rank 0 was in a call when the run ended." in text
    assert "cut off" not in text
    assert "Waits: none has ended: see above" in text
