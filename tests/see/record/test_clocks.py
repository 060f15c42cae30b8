"""Clocks of several hosts on one: what is unknown is estimated within the bound that is told, and never guessed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from playground.algorithms import load_all_reduce
from playground.runtime import UsageError
from playground.see.record import RECEIVE, SEND, VALUES
from playground.see.record.layout import read_folder
from playground.see.record.rank import recorded
from playground.see.record.run import SECOND, Clock, ClockSample, merge, read_recording
from playground.testing import World

Worlds = Callable[..., World]
AHEAD, FASTER = 5_000_000, 50e-6
"""Nanoseconds, and nanoseconds per nanosecond."""


@given(
    offset=st.integers(-(10**12), 10**12), drift=st.floats(-1e-4, 1e-4), length=st.integers(1, 10**12),
    place=st.floats(0, 1),
)  # fmt: skip
def test_a_steady_drift_is_followed(offset: int, drift: float, length: int, place: float) -> None:
    samples = [ClockSample(at, offset + round(drift * at), 10) for at in (0, length)]
    clock, time_there = Clock(tuple(samples)), round(place * length)
    assert clock.to_rank_0(time_there) == pytest.approx(time_there + offset + drift * time_there, abs=2)
    assert clock.bound(length) == 10


def test_one_comparison_bounds_what_follows_by_how_far_clocks_drift() -> None:
    clock = Clock((ClockSample(0, 7, 10),))
    assert (clock.to_rank_0(100), clock.bound(10**9)) == (107, 10 + 10**5)


def test_a_shared_clock_is_not_corrected() -> None:
    assert (Clock().to_rank_0(3), Clock().bound(3)) == (3, 0)


def send_with_a_wrong_clock(rank: int, size: int, folder: Path) -> list[tuple[int, int]]:
    """The second host's clock is ahead, and runs faster. Between which times, on the right clock, each of the instants
    was that are recorded."""
    start = time.perf_counter_ns()
    instants = []

    def clock() -> int:
        now = time.perf_counter_ns()
        return now if rank < size // 2 else now + AHEAD + round(FASTER * (now - start))

    with recorded(folder, rank, size, clock=clock) as recorder:
        for _ in range(5):
            load_all_reduce("ring")(torch.ones(4))
            before = time.perf_counter_ns()
            recorder.instant(VALUES, "now")
            instants.append((before, time.perf_counter_ns()))
            time.sleep(0.01)
    return instants


def test_two_clocks_become_one_within_the_bound(world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    truth = world(2).run(send_with_a_wrong_clock, tmp_path)
    recording = read_recording(tmp_path)
    bound = recording.ranks[1].clock_bound
    assert bound > 0
    told = [[event.start for event in rank.events if event.name == "now"] for rank in recording.ranks]
    for mine, theirs, (before, after), (began, ended) in zip(*told, *truth, strict=True):
        assert (began - after) / SECOND - bound <= theirs - mine <= (ended - before) / SECOND + bound
    sent = {(event.rank, event.peer, event.message): event.start for event in recording.events(SEND)}
    for event in recording.events(RECEIVE):
        assert event.peer is not None
        assert event.end > sent[event.peer, event.rank, event.message] - bound


def test_clocks_that_were_never_compared_are_not_merged(
    world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYGROUND_HOSTS", "2")
    world(2).run(send_with_a_wrong_clock, tmp_path)
    members = read_folder(tmp_path)
    lines = members.files["rank-1.tables"].splitlines(keepends=True)
    kept = b"".join(line for line in lines if not line.startswith(b'["clock"'))
    with pytest.raises(UsageError, match=r"the clock of rank 1 on .* was never compared with that of rank 0"):
        merge(type(members)({**members.files, "rank-1.tables": kept}))
