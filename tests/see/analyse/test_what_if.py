"""Replays: without a change nothing changes, on a better machine nothing becomes slower."""

from __future__ import annotations

import pytest
from drawn_programs import few, recordings
from hypothesis import given, strategies as st
from recordings import ALPHA, BETA, Compute, Receive, Send, Wait, play, ring, training

from playground.see.analyse.volumes import more_ranks
from playground.see.analyse.waits import Waits
from playground.see.analyse.what_if import Change, Replay, Straggler, fit_link, what_if
from playground.see.record import Recording


@few
@given(recordings())
def test_an_unchanged_replay_is_the_recording(recording: Recording) -> None:
    replay = Replay(Waits(recording))
    assert replay.seconds() == pytest.approx(replay.recorded, rel=1e-9)
    times = replay.times(Change())
    for lane, points in replay.lanes.items():
        assert times[lane] == pytest.approx([point.time for point in points], abs=1e-9)


@few
@given(recordings(), st.floats(0.1, 1), st.floats(1, 10))
def test_a_better_machine_is_never_slower(recording: Recording, latency: float, bandwidth: float) -> None:
    replay = Replay(Waits(recording))
    better = replay.seconds(Change(latency=latency, bandwidth=bandwidth))
    assert better <= replay.seconds() + 1e-12
    assert replay.seconds(Change(work=Straggler(replay))) <= replay.seconds() + 1e-12


@few
@given(recordings())
def test_a_worse_machine_is_never_faster(recording: Recording) -> None:
    replay = Replay(Waits(recording))
    assert replay.seconds(Change(latency=2, bandwidth=0.5)) >= replay.seconds() - 1e-12


def ping_pong(alpha: float, beta: float) -> Recording:
    """Two ranks that answer each other, with messages of several sizes."""
    sizes = [4, 1000, 100_000, 1_000_000] * 3
    first = [action for nbytes in sizes for action in (Send(1, nbytes), Receive(1, nbytes), Wait())]
    second = [action for nbytes in sizes for action in (Receive(0, nbytes), Wait(), Send(0, nbytes), Wait())]
    return play([first, second], alpha, beta)


def test_another_link_gives_what_a_run_on_it_would_take() -> None:
    found = what_if(Waits(ping_pong(ALPHA, BETA)))
    assert found.link.alpha == pytest.approx(ALPHA, rel=0.02)
    assert found.link.beta == pytest.approx(BETA, rel=0.02)
    latency, bandwidth = found.changes
    assert not latency.is_bound
    assert latency.seconds == pytest.approx(ping_pong(ALPHA / 2, BETA).end, rel=0.01)
    assert bandwidth.seconds == pytest.approx(ping_pong(ALPHA, BETA / 2).end, rel=0.01)


def test_with_messages_of_one_size_changes_are_bounds() -> None:
    found = what_if(Waits(ring(4)))
    assert found.link.nbytes == 4
    assert [change.is_bound for change in found.changes] == [True, True]
    for change in found.changes:
        assert change.seconds <= 1.01 * ring(4, alpha=ALPHA / 2).end


@pytest.mark.parametrize("straggler", range(4))
def test_without_its_straggler_a_run_takes_as_long_as_one_that_had_none(straggler: int) -> None:
    found = what_if(Waits(ring(4, straggler=straggler)))
    assert found.straggler == straggler
    assert found.changes[-1].seconds == pytest.approx(ring(4).end, rel=1e-3)


def test_nobody_is_a_straggler_where_all_work_as_long() -> None:
    assert what_if(Waits(ring(4))).straggler is None
    assert what_if(Waits(training(3))).straggler is None


def test_a_rank_that_alone_does_something_is_no_straggler() -> None:
    """A root that adds, where the others have nothing to add, is not slow."""
    programs = [[Compute(0.01, "add", line=7)], [Compute(1e-3)], [Compute(1e-3)]]
    assert what_if(Waits(play(programs))).straggler is None


def test_more_ranks_by_the_cost_model() -> None:
    (scaling,) = more_ranks(ring(4, 4000), fit_link([(4, ALPHA), (10**6, ALPHA + 10**6 * BETA)]))
    assert (scaling.algorithm, scaling.size, scaling.nbytes) == ("ring", 4, 16_000)
    assert [*scaling.predicted] == [4, 8, 16, 32]
    assert scaling.predicted[4] == pytest.approx(scaling.recorded, rel=0.05)
    recorded = more_ranks(ring(8, 4000), fit_link([(4, ALPHA), (10**6, ALPHA + 10**6 * BETA)]))[0].recorded
    assert scaling.predicted[8] == pytest.approx(recorded, rel=0.05)


@few
@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.sets(st.integers(1, 10**7), min_size=2, max_size=6))
def test_a_link_is_found(alpha: float, beta: float, sizes: set[int]) -> None:
    sizes |= {2 * min(sizes)}
    link = fit_link([(nbytes, alpha + nbytes * beta) for nbytes in sizes])
    for nbytes in sizes:
        assert link.seconds(nbytes) == pytest.approx(alpha + nbytes * beta, rel=1e-3)
    assert link.nbytes is None


@few
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e-2)), max_size=12))
def test_nothing_of_a_link_is_negative(transfers: list[tuple[int, float]]) -> None:
    link = fit_link(transfers)
    assert link.alpha >= 0
    assert link.beta >= 0
