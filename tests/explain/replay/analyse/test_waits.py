"""Waits and what caused them, down to the rank and the line that was busy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_programs import few, recordings
from hypothesis import given, strategies as st
from recordings import (
    DELAY,
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
)

import playground.explain.replay.analyse.waits as analysis
from playground.algorithms import load_all_reduce
from playground.explain.replay.analyse.timeline import covered
from playground.explain.replay.analyse.waits import Blamer, Waits
from playground.explain.replay.record.reading import read_recording
from playground.explain.replay.record.recording import (
    BACKGROUND,
    BUCKET,
    COLLECTIVE,
    COMPUTE,
    MAIN,
    WAIT,
    Event,
    Recording,
    SourceLine,
)
from playground.explain.replay.record.run import Recorded
from playground.testing import World

moments = st.floats(0, 10)
spans = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=8)


@few
@given(spans, st.tuples(moments, moments))
def test_what_intervals_cover(
    intervals: list[tuple[float, float]], at: tuple[float, float]
) -> None:
    """Every moment between two others counts once, however many intervals it is in."""
    first, last = min(at), max(at)
    edges = sorted({first, last, *(edge for each in intervals for edge in each)})
    parts = [part for part in itertools.pairwise(edges) if first <= part[0] and part[1] <= last]
    inside = [
        end - start
        for start, end in parts
        if any(each[0] <= start and end <= each[1] for each in intervals)
    ]
    assert covered(intervals, first, last) == pytest.approx(sum(inside), abs=1e-9)


@few
@given(recordings())
def test_waits_are_parts_of_the_run_and_every_chain_ends(recording: Recording) -> None:
    """None is negative, none has parts that are, and on no rank do they take longer than the run.
    Every wait of a chain lies before the one that it caused is over, and who was busy was so in a
    wait's time."""
    waits = Waits(recording)
    blamer = Blamer(waits)
    for wait in waits.all:
        assert 0 <= wait.late <= wait.seconds
        assert min(wait.by_cause().values()) >= 0
        assert isclose(sum(wait.by_cause().values()), wait.seconds, abs_tol=1e-12)
        chain = blamer.blame(wait)
        assert chain.waits[0] is wait
        assert all(cause.event.start <= wait.event.end for cause in chain.waits)
        assert chain.busy is None or 0 < chain.busy.seconds <= wait.late + 1e-12
    for rank in range(recording.size):
        of_rank = [wait for wait in waits.all if wait.event.rank == rank]
        assert sum(analysis.seconds_by_cause(of_rank).values()) <= recording.end + 1e-12


@pytest.mark.parametrize("size", [2, 5])
def test_a_straggler_is_found_from_every_wait_it_caused(size: int) -> None:
    for straggler in range(size):
        waits = Waits(ring(size, straggler=straggler))
        late = [wait for wait in waits.all if wait.late > DELAY / 2]
        assert len(late) == size - 1
        for wait in late:
            busy = Blamer(waits).blame(wait).busy
            assert busy is not None
            assert (busy.rank, busy.is_recorded, busy.event.name) == (straggler, True, "forward")
            assert source_of(waits, busy.event).line == 11
            assert abs(busy.seconds - DELAY) < 1e-3
            assert abs(wait.late - DELAY) < 1e-3


def test_ddp_waits_in_backward_from_its_last_bucket_on() -> None:
    """Autograd begins a bucket in a thread of its own. What is under way before the last one is
    hidden."""

    def step(rank: int, begins: float) -> list[Event]:
        def event(
            number: int, kind: str, name: str, start: float, end: float, **more: Any
        ) -> Event:
            return Event(number, rank, kind, name, start, end, source=number, **more)

        of_backward: dict[str, Any] = {"parent": 1, "lane": BACKGROUND, "group": (0, 1)}
        return [
            event(0, COMPUTE, "forward", begins, begins + 1),
            event(1, COMPUTE, "backward", begins + 1, 9.0),
            event(2, BUCKET, "bucket 0", begins + 2, 8.0, **of_backward),
            event(3, BUCKET, "bucket 1", begins + 3, 8.5, **of_backward),
        ]

    waits = Waits(recording_of([step(0, 0.0), step(1, 5.0)]))
    assert [(wait.event.rank, wait.event.lane, wait.seconds, wait.late) for wait in waits.all] == [
        (0, MAIN, 5.5, 5.0), (1, MAIN, 0.5, 0.0)
    ]  # fmt: skip
    assert waits.all[0].cause == analysis.LAST_TO_COME
    busy = Blamer(waits).blame(waits.all[0]).busy
    assert busy is not None
    assert (busy.rank, busy.seconds) == (1, 5.0)


def source_of(waits: Waits, event: Event) -> SourceLine:
    assert event.source is not None
    return waits.timeline.recording.sources[event.source]


def test_late_sender_is_told_from_the_transfer() -> None:
    """And work that is not recorded is found by what came after it."""
    waits = Waits(play([[Pause(DELAY), Send(1, 8, line=33), Wait()], [Receive(0, 8), Wait()]]))
    (wait,) = (wait for wait in waits.all if wait.event.rank == 1)
    assert wait.cause == analysis.LATE_SENDER
    assert wait.late == pytest.approx(DELAY, abs=1e-5)
    assert wait.transfer == pytest.approx(1e-4, abs=1e-5)
    busy = Blamer(waits).blame(wait).busy
    assert busy is not None
    assert (busy.is_recorded, source_of(waits, busy.event).line) == (False, 33)


def send_that_waits(receive_at: float) -> Waits:
    """Rank 0 sends and stands still for 10 ms, rank 1 receives at some time."""
    group = (0, 1)
    events = [
        Event(0, 0, "send", "send", 0.0, 0.010, peer=1, nbytes=8, group=group, message=0),
        Event(
            0,
            1,
            "receive",
            "recv",
            receive_at,
            receive_at + 1e-3,
            peer=0,
            nbytes=8,
            group=group,
            message=0,
        ),
    ]
    return Waits(recording_of([events[:1], events[1:]]))


def test_late_receiver_and_who_came_after_the_wait() -> None:
    """What came after it is not its cause, and of what no other rank recorded the cause is
    unknown."""
    waits = send_that_waits(receive_at=0.009)
    assert (waits.all[0].cause, waits.all[0].late) == (analysis.LATE_RECEIVER, 0.009)
    wait = send_that_waits(receive_at=0.5).all[0]
    assert (wait.cause, wait.peer, wait.late) == (analysis.TRANSFER, None, 0.0)
    (wait,) = Waits(recording_of([waits.timeline.recording.ranks[0].events, []])).all
    assert (wait.cause, wait.by_cause()) == (analysis.UNKNOWN, {analysis.UNKNOWN: 0.010})


def test_the_last_to_come_to_a_collective() -> None:
    works = (1e-3, DELAY, 2e-3)
    waits = Waits(play([[Compute(seconds, "forward"), Call("all_reduce", 8)] for seconds in works]))
    first, last, third = waits.all
    assert (first.cause, third.cause) == (analysis.LAST_TO_COME, analysis.LAST_TO_COME)
    assert first.late == pytest.approx(DELAY - 1e-3)
    assert (last.cause, last.late) == (analysis.TRANSFER, 0)
    busy = Blamer(waits).blame(first).busy
    assert busy is not None
    assert (busy.rank, busy.event.name) == (1, "forward")


def test_a_broadcast_waits_for_its_root_alone() -> None:
    recording = play([[Pause(1e-3 * rank), Call("broadcast", 8)] for rank in range(3)])
    with_root = [[replace(event, peer=1) for event in rank.events] for rank in recording.ranks]
    waits = Waits(recording_of(with_root)).all
    assert [wait.peer.rank for wait in waits if wait.peer is not None] == [1, 1]
    assert [wait.cause for wait in waits] == [
        analysis.TRANSFER,
        analysis.TRANSFER,
        analysis.TRANSFER,
    ]


def test_what_waits_inside_counts_once_and_what_never_ended_is_no_wait() -> None:
    """A collective of ours is made of messages: the waits for those are its waits."""
    waits = Waits(ring(4))
    assert {wait.event.kind for wait in waits.all} == {WAIT}
    assert len(waits.all) == 4 * 6
    assert (
        Waits(
            play([[Receive(1, 8), Wait()], [Begin(COLLECTIVE, "ring"), Call("barrier", 0), End()]])
        ).all
        == []
    )


def test_a_thread_that_had_nothing_to_do_yet_waited_for_the_main_one() -> None:
    """Rank 0 forwards for 20 ms, then its other thread sends what rank 1 waits for."""
    group = (0, 1)
    forward = Event(0, 0, "compute", "forward", 0.0, DELAY, source=10)
    send = Event(
        1,
        0,
        "send",
        "isend",
        DELAY,
        DELAY + 1e-3,
        BACKGROUND,
        peer=1,
        nbytes=8,
        group=group,
        message=0,
    )
    receive = Event(
        0, 1, "receive", "recv", 0.0, DELAY + 1e-3, peer=0, nbytes=8, group=group, message=0
    )
    waits = Waits(recording_of([[forward, send], [receive]]))
    chain = Blamer(waits).blame(waits.longest()[0])
    assert chain.busy is not None
    assert (chain.busy.rank, chain.busy.event, chain.busy.seconds) == (0, forward, DELAY)


def test_a_rank_may_have_nothing_in_its_main_thread() -> None:
    """Rank 0 sends from another thread alone, which did nothing for most of the time."""
    group = (0, 1)
    send = Event(
        0, 0, "send", "isend", DELAY, DELAY + 1e-3, BACKGROUND, peer=1, nbytes=8, group=group,
        message=0,
    )  # fmt: skip
    receive = Event(
        0, 1, "receive", "recv", 0.0, DELAY + 1e-3, peer=0, nbytes=8, group=group, message=0
    )
    waits = Waits(recording_of([[send], [receive]]))
    busy = Blamer(waits).blame(waits.longest()[0]).busy
    assert busy is not None
    assert (busy.rank, busy.event, busy.seconds) == (0, send, DELAY)


SLOW, STRAGGLER, SIZE = 0.2, 2, 3
"""The delay is larger than what a busy machine does to a rank within an all-reduce."""
LAST = 1000
"""Elements of the last all-reduce, for which the straggler is late."""


def all_reduce_late(rank: int, size: int) -> None:
    """Several rings, of several sizes; before the last of them, when the others are there, one rank
    is late."""
    all_reduce, store = load_all_reduce("ring"), dist.distributed_c10d._get_default_store()
    for numel in (16, 4096, 65_536, LAST):
        dist.barrier()
        if numel == LAST and rank == STRAGGLER:
            store.wait([f"{other} is there" for other in range(size) if other != rank])
            time.sleep(SLOW)
        elif numel == LAST:
            store.set(f"{rank} is there", "")
        all_reduce(torch.ones(numel))


def test_the_rank_and_the_line_of_a_straggler_are_blamed(
    world: Callable[..., World], tmp_path: Path
) -> None:
    world(SIZE).run(Recorded(all_reduce_late, tmp_path))
    recording = read_recording(tmp_path / "0")
    waits = Waits(recording)
    begun = {
        event.rank: event.start
        for event in recording.events(COLLECTIVE)
        if event.nbytes == 4 * LAST
    }
    in_last = [wait for wait in waits.all if wait.event.start >= begun[wait.event.rank]]
    blamed = [chain.busy for chain in map(Blamer(waits).blame, in_last) if chain.busy]
    longest = max(blamed, key=lambda busy: busy.seconds)
    assert longest.rank == STRAGGLER
    assert longest.seconds > SLOW / 2
    source = source_of(waits, longest.event)
    assert source.function == "all_reduce_late"
    assert source.file.endswith("test_waits.py")
