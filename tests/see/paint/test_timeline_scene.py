"""The figure of any recording: what it shows, in seconds and in logical time, and what it says is not shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from recordings import Action, Call, Compute, Pause, Receive, Send, Wait, play, recording_of, ring, training

from playground.see.analyse import Timeline, to_logical_time
from playground.see.paint import ARROW, BAR, LANE, Mark, Scene
from playground.see.paint.painters import to_svg
from playground.see.paint.timeline import MOST_ARROWS, ROW, cluster_short, lay_out
from playground.see.record import BACKGROUND, COMPUTE, PHASE, Event


def of_kind(scene: Scene, kind: str) -> list[Mark]:
    return [mark for mark in scene.marks if mark.kind == kind]


def test_a_ring_has_a_lane_a_rank_an_arrow_a_message_and_bars_where_its_events_are() -> None:
    recording = ring(4)
    scene = lay_out(recording)
    lanes, arrows = of_kind(scene, LANE), of_kind(scene, ARROW)
    assert (len(lanes), len(arrows)) == (4, 4 * 6)
    assert "rank 0 → rank 1, 4 B: [1]" in {mark.title for mark in arrows}
    events = Timeline(recording).by_ref
    for mark in of_kind(scene, BAR):
        if mark.event:
            at = events[mark.event].start / recording.end
            assert mark.x == pytest.approx(lanes[0].x + lanes[0].w * at, abs=0.1)


def test_overlapping_collectives_lie_in_rows_of_their_own() -> None:
    call = Call("all_reduce", 4096, blocking=False)
    both: list[Action] = [call, call, Pause(0.001), Wait()]
    scene = lay_out(play([both, both]))
    bars = [mark for mark in of_kind(scene, BAR) if mark.style == "communication"]
    assert len({mark.y for mark in bars if mark.event and mark.event[0] == 0}) == 2


def test_of_too_many_messages_some_are_drawn_and_it_is_said() -> None:
    scene = lay_out(play([[*[Send(1, 8)] * 400, Wait()], [*[Receive(0, 8)] * 400, Wait()]]))
    assert len(of_kind(scene, ARROW)) == MOST_ARROWS
    assert any(line.startswith(f"{MOST_ARROWS} of 400 messages are drawn") for line in scene.caption)


def test_logical_steps_of_a_ring_depend_on_no_speed() -> None:
    """Computing takes one, each of 2(N - 1) messages one, and each of N - 1 additions one."""
    for size in (2, 4, 5):
        one, other = (to_logical_time(ring(size, alpha=alpha, straggler=1)) for alpha in (1e-4, 1e-2))
        assert one.end == 1 + 2 * (size - 1) + (size - 1)
        assert len(list(one.events())) == len(list(ring(size).events()))
        assert [(e.start, e.end) for e in one.events()] == [(e.start, e.end) for e in other.events()]


def test_what_waits_for_ever_has_no_logical_end() -> None:
    logical = to_logical_time(play([[Compute(0.1), Receive(1, 8), Wait()], [Compute(0.1)]]))
    assert {event.name: event.end for event in logical.events() if event.rank == 0} == {
        "add": 1.0, "irecv": float("inf"),
    }  # fmt: skip


def test_ends_that_came_before_what_they_waited_for_have_no_logical_time() -> None:
    """By clocks that are wrong, or in a damaged recording: each rank sends after it has received the other's."""
    events = [[Event(at, rank, kind, kind, at, at + 0.5, peer=1 - rank, message=0, group=(0, 1))
               for at, kind in enumerate(("receive", "send"))] for rank in range(2)]  # fmt: skip
    logical = to_logical_time(recording_of(events))
    assert [(event.name, event.start, event.end) for event in logical.events()] == [("receive", 0, float("inf"))] * 2


def test_of_values_that_are_too_large_the_shape_is_told() -> None:
    scene = lay_out(play([[Send(1, 4000), Wait()], [Receive(0, 4000), Wait()]]))
    [arrow] = of_kind(scene, ARROW)
    assert arrow.title == "rank 0 → rank 1, 3.906 KiB of shape 1000"


def test_short_events_are_drawn_together_where_they_are() -> None:
    """In a long run nothing is a pixel wide, and yet it is seen what ranks do, everywhere."""
    recording = training(2, steps=500)
    scene = lay_out(recording)
    pieces = [mark for mark in of_kind(scene, BAR) if mark.style in ("forward", "backward", "optimizer")]
    covered = sum(mark.w for mark in pieces if mark.y == min(each.y for each in pieces))
    assert covered > 0.9 * of_kind(scene, LANE)[0].w
    assert len(to_svg(scene)) < 100_000
    assert any("narrower than a pixel are drawn together" in line for line in scene.caption)


@given(st.lists(st.tuples(st.floats(0, 500), st.sampled_from(["wait", "compute"])), max_size=60))
def test_groups_hold_every_short_event_once_and_do_not_overlap(short: list[tuple[float, str]]) -> None:
    events = list(ring(2).events(COMPUTE))[:1] * len(short)
    groups = cluster_short((left, left + 0.5, style, event) for (left, style), event in zip(short, events, strict=True))
    assert sum(len(group.events) for group in groups) == len(short)
    for group, following in pairwise(groups):
        assert group.left <= group.right
        assert group.right <= following.left + 0.5


def test_threads_that_work_at_once_are_below_each_other() -> None:
    """Each in a row of its own, and what it computes in the same; the main thread's lane is as high as ever."""
    alone = ring(2)
    first = len(alone.ranks[0].events)
    threads = [
        Event(
            number=first + 2 * thread + inner, rank=0, kind=COMPUTE if inner else PHASE, name=f"cpu:{thread}",
            start=0.01 * thread + 0.001 * inner, end=0.1, lane=BACKGROUND, parent=first + 2 * thread if inner else None,
        )
        for thread in range(3)
        for inner in range(2)
    ]  # fmt: skip
    rank = replace(alone.ranks[0], events=(*alone.ranks[0].events, *threads))
    scene = lay_out(replace(alone, ranks=(rank, alone.ranks[1])))
    bars = {mark.event: mark.y for mark in of_kind(scene, BAR) if mark.event}
    tops = [bars[0, event.number] for event in threads]
    assert tops[::2] == tops[1::2] == [tops[0], tops[0] + ROW, tops[0] + 2 * ROW]
    lanes, before = ([mark.h for mark in of_kind(each, LANE)] for each in (scene, lay_out(alone)))
    assert lanes == [before[0], 3 * ROW, before[1]]
