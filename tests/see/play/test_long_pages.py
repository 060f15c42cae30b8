"""Pages of long runs: how large they are, and what is left out."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from recordings import ring

from playground.see import play as player
from playground.see.files import paint
from playground.see.play import to_columns


def test_a_page_of_a_lesson_is_small(tmp_path: Path) -> None:
    paint(ring(8), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size <= 120_000


@pytest.mark.parametrize("most", [10, 50, 1000])
def test_a_page_of_a_very_long_run_has_its_beginning(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "MAX_EVENTS", most)
    recording = ring(4, straggler=1)
    every = sorted(recording.events(), key=lambda event: event.start)
    shown, later = player.beginning_of(recording)
    here = sorted(shown.events(), key=lambda event: event.start)
    assert [(event.rank, event.number) for event in here] == [(e.rank, e.number) for e in every[: len(here)]]
    assert 0 < len(here) <= most
    assert later == len(every) - len(here) == to_columns(recording)["later"]
    until = every[len(here)].start if later else inf
    assert [event.end for event in here] == [e.end if e.end <= until else inf for e in every[: len(here)]]
