"""How much of the communication was hidden."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, strategies as st
from recordings import on_gpus, recording_of, ring, training

from playground.see.analyse import clip, subtract, total, union
from playground.see.analyse.overlap import overlaps
from playground.see.record import DEVICE, Event

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
    (found,) = overlaps(recording_of([[*events, barrier, replace(barrier, number=3, name="all_reduce", nbytes=8)]]))
    assert (found.compute, found.communication, found.overlap) == (1.75, 0.25, 0.0)  # less what stood still for it
    assert overlaps(recording_of([[*events, barrier]])) == overlaps(ring(2)) == []


DEVICE_STEP = [
    ("compute", "forward", 0.0, 1.0),
    ("compute", "backward", 1.0, 3.0),
    ("collective", "all_reduce", 2.0, 4.0),
    ("gradient", "weight", 3.0, 3.0),
    ("compute", "step", 4.0, 5.0),
]
"""What a device does, and when."""


def test_where_the_device_has_told_its_times_they_count() -> None:
    """The host issues in no time what the device does for seconds: two steps, before the device has begun the first."""
    host: list[Event] = []
    device: list[Event] = []
    for step in range(2):
        begun = step / 10
        for number, (kind, name, start, end) in enumerate(DEVICE_STEP):
            ref, at = len(host), begun + number / 100
            nbytes = 8 if kind == "collective" else 0
            host.append(Event(ref, 0, kind, name, at, inf if nbytes else at + 0.001, nbytes=nbytes))
            late = 1 + 5 * step
            device.append(Event(0, 0, kind, name, late + start, late + end, DEVICE, ref, nbytes=nbytes))
    device = [replace(event, number=number) for number, event in enumerate(device, len(host))]
    for number, event in enumerate(host[:5], 2 * len(host)):  # what the host waits for has nothing to do with it
        device.append(replace(event, number=number, kind="wait", start=event.start + 1, end=event.start + 2))
        device.append(replace(device[-1], number=number + 5, kind="send", nbytes=8))
    (found,) = overlaps(on_gpus(recording_of([[*host, *device]])))
    assert (found.overlap, found.compute, found.communication) == (2.0, 8.0, 4.0)
    assert overlaps(on_gpus(recording_of([host]))) == []
