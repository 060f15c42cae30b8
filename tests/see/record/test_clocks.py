"""Clocks of several hosts become one, within the bound that is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Network

from playground.algorithms import load_all_reduce
from playground.see.analyse import match_messages
from playground.see.record import VALUES
from playground.see.record.rank import recorded
from playground.see.record.run import SECOND, read_recording
from playground.testing import World

Worlds = Callable[..., World]
AHEAD, FASTER = 5_000_000, 50e-6
"""Nanoseconds, and nanoseconds per nanosecond."""


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
    assert all(send.start - bound < receive.end for send, receive in match_messages(recording)[0])


@pytest.mark.stress
def test_two_hosts_make_one_recording(hosts: Callable[..., Network], tmp_path: Path) -> None:
    """Each host writes to a folder of its own, as hosts without a common disk do."""
    machines = hosts(2).hosts
    files = [tmp_path / host.name / "ring.playground" for host in machines]
    for file in files:
        file.parent.mkdir()
    programs: list[Any] = [
        host.torchrun(2, "allreduce", "--algorithm", "ring", "--see", file)
        for host, file in zip(machines, files, strict=True)
    ]
    outcomes = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outcomes
    assert [file.exists() for file in files] == [True, False]
    recording = read_recording(files[0])
    assert [rank.host for rank in recording.ranks] == [host.name for host in machines for _ in range(2)]
    assert [rank.is_cut_off for rank in recording.ranks] == [False] * 4
    bound = max(rank.clock_bound for rank in recording.ranks)
    assert "clocks agree within" in outcomes[0][1]
    matched, unmatched = match_messages(recording)
    assert (len(matched) > 0, unmatched) == (True, [])
    assert all(send.start - bound < receive.end for send, receive in matched)
