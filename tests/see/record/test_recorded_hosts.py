"""Recordings of ranks on several hosts: their clocks are compared, and their files come to rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import Network

from playground.see.record import RECEIVE, SEND
from playground.see.record.run import read_recording


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
    sent = {(event.rank, event.peer, event.message): event for event in recording.events(SEND)}
    arrived = list(recording.events(RECEIVE))
    assert len(arrived) == len(sent) > 0
    for event in arrived:
        assert event.peer is not None
        assert event.end > sent[event.peer, event.rank, event.message].start - bound
