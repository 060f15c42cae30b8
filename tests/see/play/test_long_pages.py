"""Pages of long runs: how large they are, how soon they can be used, and how fast one goes through them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from browser import MISSING, browser
from recordings import ring

from playground.see import play as player
from playground.see.files import paint
from playground.see.play import to_columns
from playground.see.record import RankRecording, Recording

SCRUB = """
const position = document.getElementById('position'), frames = 60, begun = performance.now();
let shown = 0;
const next = () => {
  position.value = position.max * ((shown * 37) % frames) / frames;
  position.dispatchEvent(new Event('input'));
  if (++shown < frames) requestAnimationFrame(next); else done(1000 * frames / (performance.now() - begun));
};
next();
"""
"""Go to and fro, a frame at a time. How many frames there are in a second."""


def again_and_again(recording: Recording, times: int) -> Recording:
    """What was recorded, so many times one after the other."""
    return replace(recording, ranks=tuple(repeat(rank, times, recording.end) for rank in recording.ranks))


def repeat(rank: RankRecording, times: int, seconds: float) -> RankRecording:
    """A rank that does so many times what it did, each time so many seconds later."""
    count = len(rank.events)
    sent = 1 + max(event.message or 0 for event in rank.events)
    events = (
        replace(
            event, number=event.number + turn * count,
            start=event.start + turn * seconds, end=event.end + turn * seconds,
            parent=None if event.parent is None else event.parent + turn * count,
            message=None if event.message is None else event.message + turn * sent,
            awaits=tuple(number + turn * count for number in event.awaits),
        )
        for turn in range(times)
        for event in rank.events
    )  # fmt: skip
    return replace(rank, events=tuple(events))


@pytest.mark.stress
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_hundred_thousand_events(tmp_path: Path) -> None:
    once = ring(4, straggler=1)
    times = 1 + 100_000 // sum(len(rank.events) for rank in once.ranks)
    page = tmp_path / "page.html"
    paint(again_and_again(once, times), page)
    assert page.stat().st_size <= 3_000_000
    with browser() as window:
        window.open(page)
        window.wait_for("#status", "of")
        for clock in ("logical", "real"):
            assert window.ask("return document.getElementById('clock').value") == clock
            print(f"{clock}: {window.ask_later(SCRUB):.0f} frames a second")
            window.press("t")
        usable = window.ask("return performance.getEntriesByName('usable')[0].startTime")
        print(f"usable after {usable:.0f} ms, {page.stat().st_size:,} bytes")
        assert window.complaints() == []


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
