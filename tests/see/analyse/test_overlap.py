"""How much of the communication was hidden."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from recordings import on_gpus, recording_of, ring, training

from playground.see.analyse import clip, subtract, total, union
from playground.see.analyse.overlap import overlaps
from playground.see.record import Event

moments = st.floats(0, 10)
spans = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(spans, spans, st.tuples(moments, moments))
def test_intervals(
    intervals: list[tuple[float, float]], others: list[tuple[float, float]], at: tuple[float, float]
) -> None:
    """A union counts every moment once, and what is subtracted is gone."""
    joined, left = union(intervals), subtract(intervals, others)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(joined))
    assert total(joined) <= total(intervals) + 1e-9
    assert -1e-9 <= total(clip(joined, min(at), max(at))) <= min(total(joined), max(at) - min(at)) + 1e-9
    for first, last in intervals:
        assert total(clip(joined, first, last)) == pytest.approx(last - first)
    assert total(left) <= total(joined) + 1e-9
    assert total(union([*left, *others])) == pytest.approx(total(union([*intervals, *others])))
    assert all(clip(left, first, last) == [] for first, last in others)


def test_the_overlap_of_training() -> None:
    """In each of 3 steps 2 ms of backward beside an all-reduce of 3 ms."""
    found = overlaps(training(2, exposed=1e-3, hidden=2e-3, steps=3))
    assert [each.rank for each in found] == [0, 1]
    for each in found:
        assert each.compute == pytest.approx(3 * 5.5e-3, abs=1e-5)
        assert each.communication == pytest.approx(3 * 3e-3, abs=1e-5)
        assert each.overlap == pytest.approx(3 * 2e-3, abs=1e-5)
        assert each.hidden == pytest.approx(2 / 3, abs=1e-2)


def test_what_is_no_training_and_what_moves_no_bytes_is_left_out() -> None:
    events = [Event(at, 0, "compute", name, float(at), at + 1.0) for at, name in enumerate(("forward", "backward"))]
    barrier = Event(2, 0, "collective", "barrier", 1.5, 1.75)
    before = Event(3, 0, "collective", "broadcast", -1.0, -0.5, nbytes=8)
    (found,) = overlaps(
        recording_of([[*events, barrier, before, replace(barrier, number=4, name="all_reduce", nbytes=8)]])
    )
    assert (found.compute, found.communication, found.overlap) == (1.75, 0.25, 0.0)  # less what stood still for it
    assert overlaps(recording_of([[*events, barrier]])) == overlaps(ring(2)) == []


def test_on_gpus_times_are_those_of_issue_and_tell_no_overlap() -> None:
    assert overlaps(on_gpus(training(2))) == []
