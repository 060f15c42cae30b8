"""Where the parts of a player are: the timeline under the slider, each rank in a low row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import MISSING, Browser
from player_sizes import check_sizes
from recordings import Action, Begin, Call, Compute, End, Receive, Send, Wait, play, ring

from playground.explain.replay.analyse.logical_time import to_logical_time
from playground.explain.replay.files import render
from playground.explain.replay.play.columns import to_columns
from playground.explain.replay.play.player import render_player
from playground.explain.replay.record.recording import BUCKET, COLLECTIVE, COMPUTE, PHASE, Recording

in_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
NUMBERS = 64


def ddp_steps(size: int) -> Recording:
    """Steps as DDP's, of which each ends in an all-reduce of numbers, as of a metric."""
    step: list[Action] = [
        Begin(PHASE, "training step"), Compute(1e-3, "forward"),
        Begin(COMPUTE, "backward"), Begin(BUCKET, "bucket 0", 4 * NUMBERS), Compute(1e-3, "add"),
        End(), End(), Compute(1e-4, "step"), End(),
        Begin(COLLECTIVE, "all_reduce", 4 * NUMBERS), End(tuple(0.001 * n for n in range(NUMBERS))),
    ]  # fmt: skip
    return play([step * 3] * size)


def test_the_timeline_is_under_the_slider_and_words_are_below_it() -> None:
    """Nothing is between them in the page; the script puts the timeline first into `runs`."""
    page = render_player(ring(2))
    between = page.partition('name="position"')[2].partition('<div class="runs">')[0]
    assert re.findall(r"<(\w+)", between) == []
    assert '<div class="runs"><p class="status"' in page


def test_ranks_without_messages_have_no_room_for_them() -> None:
    """A lane ends where the next begins, but for a gap in which arrows are drawn."""
    apart: list[list[Action]] = [[Call("barrier", 0)]] * 3
    sent: list[list[Action]] = [[Send(1, 4), Wait()], [Receive(0, 4), Wait()], []]
    heights = []
    for programs in (apart, sent):
        lanes = to_columns(play(programs))["lanes"]
        assert isinstance(lanes, list)
        (_, _, top, height), (_, _, below, _) = lanes[:2]
        heights.append(below - top - height)
    assert heights == [8, 32]


def test_a_bucket_takes_a_step_of_all_ranks() -> None:
    """So it is drawn; as the all-reduce that it is, it ends after all ranks have begun it."""
    timed = to_logical_time(ddp_steps(3))
    for rank in timed.ranks:
        buckets = [event for event in rank.events if event.kind == BUCKET]
        assert len(buckets) == 3
        assert all(event.end - event.start >= 1 for event in buckets)
    bucket: list[Action] = [Begin(BUCKET, "bucket 0", 4), End()]
    late = to_logical_time(play([bucket, [Compute(1e-3), *bucket]]))
    (first,), (_, last) = [rank.events for rank in late.ranks]
    assert first.end == last.start + 1


NUMBERS_OF_RANK_0 = """
const spans = [...document.querySelector('tbody tr').querySelectorAll('.values span')];
const shown = spans.filter(each => each.checkVisibility());
return [spans.length, shown.length, new Set(shown.map(each => each.offsetTop)).size];
"""
"""How many there are, how many are shown, and in how many lines."""


@in_browser
@pytest.mark.parametrize("size", [2, 4])
def test_a_training_is_in_sight_and_its_numbers_open(
    size: int, window: Browser, tmp_path: Path
) -> None:
    """One line of them, after the name of the collective that they are of; then all."""
    page = tmp_path / "page.html"
    render(ddp_steps(size), page)
    for width in (1400, 400):
        window.open(page, width=width, height=900, reduced_motion="reduce")
        window.wait_for(".status", "of")
        assert check_sizes(window, "a training", width) == 1
        window.press("\ue010")
        window.wait_for("tbody .values", "more")
        assert window.text("tbody .values i") == "after all_reduce"
        there, shown, lines = before = window.ask(NUMBERS_OF_RANK_0)
        assert (there, lines) == (NUMBERS, 1)
        assert window.text("tbody .values button") == f"… {NUMBERS - shown} more"
        click = "document.querySelector('tbody .values button').click()"
        window.ask(click)
        assert window.ask(NUMBERS_OF_RANK_0)[:2] == [NUMBERS, NUMBERS]
        check_sizes(window, "opened", width)
        window.ask(click)
        assert window.ask(NUMBERS_OF_RANK_0) == before


@in_browser
def test_many_ranks_have_a_line_each_and_no_boxes_overlap(window: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    render(ddp_steps(8), page)
    window.open(page, width=1400, height=900, reduced_motion="reduce")
    window.wait_for(".status", "of")
    rows = window.ask(
        "return [...document.querySelectorAll('tbody tr')].map(each => each.offsetHeight)"
    )
    assert len(rows) == 8
    assert max(rows) < 45
    meet = """
    const places = [...document.querySelectorAll('.box')].map(each => each.getBoundingClientRect());
    return places.some((a, i) => places.slice(i + 1).some(b => a.left < b.right && b.left < a.right
      && a.top < b.bottom && b.top < a.bottom));
    """
    assert window.ask(meet) is False
