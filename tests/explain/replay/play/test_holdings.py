"""What ranks hold, and the columns that a page has of a recording, and how large it is: no browser
is needed here."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf, isnan, nan
from typing import Any

from hypothesis import given, settings, strategies as st
from recordings import Action, Begin, End, Instant, Receive, Send, Wait, play, ring

from playground.explain.replay.analyse.holdings import holdings_of
from playground.explain.replay.play.columns import MAX_NUMBERS, to_columns, to_numbers
from playground.explain.replay.play.player import render_page, to_json
from playground.explain.replay.record.recording import COLLECTIVE, VALUES, Recording


def held(recording: Recording, rank: int) -> list[tuple[float, ...]]:
    return [change.values for change in holdings_of(recording.ranks[rank])]


def test_a_ring_holds_its_sums_chunk_by_chunk() -> None:
    """Rank 0 begins with ones, sends on what it has added to, and ends with all sums."""
    states = held(ring(4), 0)
    assert states[0] == (1.0,) * 4
    assert states[-1] == (1111.0,) * 4
    changed = [
        sum(a != b for a, b in zip(before, after, strict=True))
        for before, after in pairwise(states)
    ]
    assert changed == [1] * len(changed)  # a chunk at a time


def test_what_is_received_is_held_but_for_parts_of_a_collective_s_tensor() -> None:
    """Of what a collective received it is not told where it belongs."""
    before = Instant(VALUES, "before", (7.0,))
    recording = play([[before, Send(1, 4, (7.0,)), Wait()], [Receive(0, 4, (7.0,)), Wait()], []])
    assert [held(recording, rank) for rank in range(3)] == [[(7.0,)], [(7.0,)], []]
    inside: list[Action] = [
        Begin(COLLECTIVE, "ours", 8, (2,)),
        Instant(VALUES, "before", (1.0, 2.0)),
    ]
    recording = play(
        [[Send(1, 4, (9.0,)), Wait()], [*inside, Receive(0, 4, (9.0,)), Wait(), End((1.0, 11.0))]]
    )
    assert held(recording, 1) == [(1.0, 2.0), (1.0, 11.0)]


def unpack(rank: dict[str, Any]) -> dict[str, list[int]]:
    """The columns of a rank, as the page reads them."""
    return dict(json.loads(zlib.decompress(base64.b64decode(rank["packed"]))))


@settings(max_examples=20)
@given(size=st.integers(1, 5), straggler=st.integers(0, 4), elements=st.integers(1, 9))
def test_columns_are_the_events(size: int, straggler: int, elements: int) -> None:
    recording = ring(size, elements, straggler=straggler)
    columns: dict[str, Any] = to_columns(recording)
    for rank, column in zip(recording.ranks, map(unpack, columns["ranks"]), strict=True):
        times = [(round(event.start * 1e9), round(event.end * 1e9)) for event in rank.events]
        starts = accumulate(column["start"])
        assert [
            (start, start + long) for start, long in zip(starts, column["long"], strict=True)
        ] == times
        assert [columns["whats"][what][:2] for what in column["what"]] == [
            (e.kind, e.name) for e in rank.events
        ]
        parents = [None if not up else place - up for place, up in enumerate(column["up"])]
        assert parents == [event.parent for event in rank.events]


@given(st.lists(st.floats()))
def test_numbers_survive_json(values: list[float]) -> None:
    special = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
    read = [
        special.get(number, number) for number in json.loads(to_json(to_numbers(tuple(values))))
    ]
    assert all(a == b or (isnan(a) and isnan(b)) for a, b in zip(values, read, strict=True))


def test_no_text_ends_the_element_that_it_is_in() -> None:
    recording = replace(
        ring(2),
        command=("</title>", "<b>"),
        texts={"lesson.py": "</script><script>alert(1)</script><!--"},
    )
    page = render_page(recording)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<b>" not in page
    assert "<!--" not in page


def test_values_beyond_what_a_page_has_room_for_are_counted() -> None:
    many = [
        Instant(VALUES, "before", (float(number),) * 1000)
        for number in range(MAX_NUMBERS // 1000 + 3)
    ]
    columns: dict[str, Any] = to_columns(play([many]))
    assert sum(map(len, columns["vectors"])) == MAX_NUMBERS
    assert columns["leftOut"] == 3
    assert [change[2] for change in columns["holdings"][0]][-2:] == [MAX_NUMBERS // 1000 - 1, None]


def test_a_page_of_a_lesson_is_small() -> None:
    assert len(render_page(ring(8))) <= 120_000
