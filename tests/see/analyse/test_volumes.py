"""What our algorithms sent, beside their closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_programs import few
from hypothesis import given, strategies as st
from recordings import ELEMENT, Begin, Call, End, Receive, Send, Wait, play, recording_of, ring

from playground.see.analyse.volumes import ranks_per_host_of, volumes
from playground.see.record import COLLECTIVE, SEND, Recording


@few
@given(st.integers(2, 8), st.integers(1, 30))
def test_a_ring_sends_what_its_closed_form_says(size: int, elements: int) -> None:
    (volume,) = volumes(ring(size, elements))
    assert volume.agrees
    assert sum(volume.messages) == volume.expected.messages == 2 * (size - 1) * min(size, elements)
    assert sum(volume.sent) == 2 * (size - 1) * elements * ELEMENT
    assert volume.nbytes == elements * ELEMENT


def test_a_message_too_few_is_seen() -> None:
    recording = ring(4)
    sends = [*recording.events(SEND)]
    events = [[event for event in rank.events if event != sends[3]] for rank in recording.ranks]
    (volume,) = volumes(recording_of(events))
    assert not volume.agrees
    assert volume.messages == (5, 6, 6, 6)


def exchange(name: str, elements: int, itemsize: int = ELEMENT) -> Recording:
    """Two ranks that swap whole tensors."""
    nbytes = elements * itemsize
    begin = Begin(COLLECTIVE, name, nbytes, (elements,))
    return play([[begin, Send(1 - rank, nbytes), Receive(1 - rank, nbytes), Wait(), End()] for rank in range(2)])


@pytest.mark.parametrize("name", ["all_to_all", "tutorial-ring", "recursive-doubling", "auto"])
@pytest.mark.parametrize(("elements", "itemsize"), [(16, 4), (1, 8), (5, 2)])
def test_two_ranks_that_swap(name: str, elements: int, itemsize: int) -> None:
    (volume,) = volumes(exchange(name, elements, itemsize))
    assert volume.agrees
    assert volume.sent == (elements * itemsize, elements * itemsize)


def test_a_half_of_the_ring() -> None:
    (volume,) = volumes(exchange("reduce_scatter", 16))
    assert not volume.agrees  # half a tensor would do
    assert volume.expected.bytes == 2 * 8 * ELEMENT


def test_what_is_not_ours_has_no_closed_form() -> None:
    assert volumes(play([[Call("all_reduce", 8)]] * 2)) == []


def test_what_not_all_ranks_went_through_is_left_out() -> None:
    recording = ring(4)
    assert volumes(recording_of([*(rank.events for rank in recording.ranks[:3]), []])) == []


@pytest.mark.parametrize(
    ("hosts", "expected"), [("aaaa", 4), ("aabb", 2), ("aab", 2), ("abb", None), ("abab", None), ("abc", 1)]
)
def test_ranks_per_host(hosts: str, expected: int | None) -> None:
    recording = ring(len(hosts))
    ranks = tuple(replace(rank, host=host) for rank, host in zip(recording.ranks, hosts, strict=True))
    assert ranks_per_host_of(range(len(hosts)), replace(recording, ranks=ranks)) == expected
