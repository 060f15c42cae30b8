"""Waits and what caused them, down to the rank and the line that was busy."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
from drawn_programs import few, recordings
from hypothesis import given
from recordings import (
    ALPHA,
    Action,
    Begin,
    Call,
    Compute,
    End,
    Pause,
    Receive,
    Send,
    Wait,
    play,
    recording_of,
    ring,
)  # fmt: skip

from playground.see.analyse.waits import (
    LAST_TO_COME,
    LATE_RECEIVER,
    LATE_SENDER,
    TRANSFER,
    UNKNOWN,
    Blamer,
    Waits,
    seconds_by_cause,
)
from playground.see.record import BACKGROUND, COLLECTIVE, WAIT, Event, Recording

DELAY = 0.02


@few
@given(recordings())
def test_waits_are_parts_of_the_run(recording: Recording) -> None:
    """None is negative, none has parts that are, and on no rank do they take longer than the run."""
    waits = Waits(recording).all
    for wait in waits:
        assert 0 <= wait.late <= wait.seconds
        assert min(wait.by_cause().values()) >= 0
        assert isclose(sum(wait.by_cause().values()), wait.seconds, abs_tol=1e-12)
    for rank in range(recording.size):
        of_rank = [wait for wait in waits if wait.event.rank == rank]
        assert sum(seconds_by_cause(of_rank).values()) <= recording.end + 1e-12


@few
@given(recordings())
def test_every_chain_ends(recording: Recording) -> None:
    """Every wait in it lies before the one that it caused is over, and who was busy was so in a wait's time."""
    waits = Waits(recording)
    blamer = Blamer(waits)
    for wait in waits.all:
        chain = blamer.blame(wait)
        assert chain.waits[0] is wait
        assert all(cause.event.start <= wait.event.end for cause in chain.waits)
        if chain.busy is not None:
            assert 0 < chain.busy.seconds <= wait.late + 1e-12


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_straggler_is_found_from_every_wait_it_caused(size: int) -> None:
    for straggler in range(size):
        waits = Waits(ring(size, straggler=straggler))
        blamer = Blamer(waits)
        late = [wait for wait in waits.all if wait.late > DELAY / 2]
        assert len(late) == size - 1
        for wait in late:
            chain = blamer.blame(wait)
            assert (chain.busy or chain.waits[-1].event).rank == straggler
            assert chain.busy is not None
            assert chain.busy.is_recorded
            assert chain.busy.event.name == "forward"
            assert line_of(waits, chain.busy.event) == 11
            assert abs(chain.busy.seconds - DELAY) < 1e-3
            assert abs(wait.late - DELAY) < 1e-3


def line_of(waits: Waits, event: Event) -> int | None:
    source = waits.timeline.source(event)
    return None if source is None else source.line


def test_late_sender_is_told_from_the_transfer() -> None:
    waits = Waits(play([[Pause(DELAY), Send(1, 8), Wait()], [Receive(0, 8), Wait()]]))
    (wait,) = (wait for wait in waits.all if wait.event.rank == 1)
    assert wait.cause == LATE_SENDER
    assert wait.late == pytest.approx(DELAY, abs=1e-5)
    assert wait.transfer == pytest.approx(ALPHA, abs=1e-5)


def test_work_that_is_not_recorded_is_found_by_what_came_after_it() -> None:
    waits = Waits(play([[Pause(DELAY), Send(1, 8, line=33), Wait()], [Receive(0, 8), Wait()]]))
    chain = Blamer(waits).blame(waits.longest()[0])
    assert chain.busy is not None
    assert not chain.busy.is_recorded
    assert line_of(waits, chain.busy.event) == 33


def send_that_waits(receive_at: float) -> Waits:
    """Rank 0 sends and stands still for 10 ms, rank 1 receives at some time."""
    group = (0, 1)
    events = [
        Event(0, 0, "send", "send", 0.0, 0.010, peer=1, nbytes=8, group=group, message=0),
        Event(0, 1, "receive", "recv", receive_at, receive_at + 1e-3, peer=0, nbytes=8, group=group, message=0),
    ]
    return Waits(recording_of([events[:1], events[1:]]))


def test_late_receiver() -> None:
    wait = send_that_waits(receive_at=0.009).all[0]
    assert (wait.cause, wait.late) == (LATE_RECEIVER, 0.009)


def test_who_came_after_the_wait_is_not_its_cause() -> None:
    wait = send_that_waits(receive_at=0.5).all[0]
    assert (wait.cause, wait.peer, wait.late) == (TRANSFER, None, 0.0)


def test_of_what_no_other_rank_recorded_the_cause_is_unknown() -> None:
    recording = send_that_waits(receive_at=0.009).timeline.recording
    (wait,) = Waits(recording_of([recording.ranks[0].events, []])).all
    assert (wait.cause, wait.by_cause()) == (UNKNOWN, {UNKNOWN: 0.010})


def test_the_last_to_come_to_a_collective() -> None:
    programs: list[list[Action]] = [
        [Compute(seconds, "forward"), Call("all_reduce", 8)] for seconds in (1e-3, DELAY, 2e-3)
    ]
    waits = Waits(play(programs))
    first, last, third = waits.all
    assert (first.cause, third.cause) == (LAST_TO_COME, LAST_TO_COME)
    assert first.late == pytest.approx(DELAY - 1e-3)
    assert (last.cause, last.late) == (TRANSFER, 0)
    chain = Blamer(waits).blame(first)
    assert ((chain.busy or chain.waits[-1].event).rank, chain.busy and chain.busy.event.name) == (1, "forward")


def test_a_broadcast_waits_for_its_root_alone() -> None:
    recording = play([[Pause(1e-3 * rank), Call("broadcast", 8)] for rank in range(3)])
    with_root = [[replace(event, peer=1) for event in rank.events] for rank in recording.ranks]
    waits = Waits(recording_of(with_root)).all
    assert [wait.peer.rank for wait in waits if wait.peer is not None] == [1, 1]
    assert [wait.cause for wait in waits] == [TRANSFER, TRANSFER, TRANSFER]


def test_what_waits_inside_counts_once() -> None:
    """A collective of ours is made of messages: the waits for those are its waits."""
    waits = Waits(ring(4))
    assert {wait.event.kind for wait in waits.all} == {WAIT}
    assert len(waits.all) == 4 * 6


def test_what_never_ended_is_no_wait() -> None:
    waits = Waits(play([[Receive(1, 8), Wait()], [Begin(COLLECTIVE, "ring"), Call("barrier", 0), End()]]))
    assert waits.all == []


def test_a_thread_that_had_nothing_to_do_yet_waited_for_the_main_one() -> None:
    """Rank 0 forwards for 20 ms, then its other thread sends what rank 1 waits for."""
    group = (0, 1)
    forward = Event(0, 0, "compute", "forward", 0.0, DELAY, source=10)
    send = Event(1, 0, "send", "isend", DELAY, DELAY + 1e-3, BACKGROUND, peer=1, nbytes=8, group=group, message=0)
    receive = Event(0, 1, "receive", "recv", 0.0, DELAY + 1e-3, peer=0, nbytes=8, group=group, message=0)
    waits = Waits(recording_of([[forward, send], [receive]]))
    chain = Blamer(waits).blame(waits.longest()[0])
    assert chain.busy is not None
    assert (chain.busy.rank, chain.busy.event, chain.busy.seconds) == (0, forward, DELAY)
