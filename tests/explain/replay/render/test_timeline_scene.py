"""The figure of any recording: what it shows, in seconds and in logical time, and what it says is
not shown."""

from __future__ import annotations

import pytest
from recordings import Action, Call, Compute, Pause, Receive, Send, Wait, play, ring

from playground.explain.replay.analyse.logical_time import to_logical_time
from playground.explain.replay.analyse.timeline import Timeline
from playground.explain.replay.render.scene import ARROW, BAR, LANE, Mark, Scene
from playground.explain.replay.render.timeline import lay_out


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


def test_of_too_many_messages_and_bars_the_longest_are_drawn_and_it_is_said() -> None:
    scene = lay_out(
        play(
            [[*[Send(1, 8)] * 400, Wait()], [*[Receive(0, 8)] * 400, Wait(), *[Compute(0.1)] * 499]]
        )
    )
    assert (
        len(of_kind(scene, ARROW)),
        sum(mark.event is not None for mark in of_kind(scene, BAR)),
    ) == (150, 400)
    assert any(line.startswith("150 of 400 messages are drawn") for line in scene.caption)
    assert any(line.startswith("400 of 501 bars are drawn") for line in scene.caption)


def test_logical_steps_of_a_ring_depend_on_no_speed() -> None:
    """Computing takes one, each of 2(N - 1) messages one, and each of N - 1 additions one."""
    for size in (2, 4, 5):
        one, other = (
            to_logical_time(ring(size, alpha=alpha, straggler=1)) for alpha in (1e-4, 1e-2)
        )
        assert one.end == 1 + 2 * (size - 1) + (size - 1)
        assert len(list(one.events())) == len(list(ring(size).events()))
        assert [(e.start, e.end) for e in one.events()] == [
            (e.start, e.end) for e in other.events()
        ]


def test_a_message_that_never_ends_is_a_bar_to_the_end() -> None:
    recording = play([[Compute(0.1), Receive(1, 8), Wait()], [Compute(0.3)]])
    scene = lay_out(recording)
    [lane, _] = of_kind(scene, LANE)
    bars = [mark for mark in of_kind(scene, BAR) if mark.style == "communication"]
    [bar] = [mark for mark in bars if mark.event]
    assert (bar.text, bar.y) == ("irecv", lane.y)
    assert bar.x + bar.w == pytest.approx(lane.x + lane.w)


def test_what_waits_for_ever_has_no_logical_end() -> None:
    logical = to_logical_time(play([[Compute(0.1), Receive(1, 8), Wait()], [Compute(0.1)]]))
    assert {event.name: event.end for event in logical.events() if event.rank == 0} == {
        "add": 1.0, "irecv": float("inf"),
    }  # fmt: skip
