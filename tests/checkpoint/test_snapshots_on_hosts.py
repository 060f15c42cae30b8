"""Two hosts: one is killed and replaced, and the end is as if nobody had disturbed them; they must
share the folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from subprocess import Popen

import pytest
from fixtures import Networks
from hosts import Host

from playground.checkpoint.folder import find_snapshots
from playground.lessons.elastic.experiment import compare

TRAIN = Path(__file__).parents[1] / "support/resumable_script.py"


def drain(program: Popen[str]) -> Popen[str]:
    """Read what a program says, lest it wait for a reader."""
    for stream in (program.stdout, program.stderr):
        assert stream
        threading.Thread(target=stream.read, daemon=True).start()
    return program


def await_step(folder: Path, step: int) -> None:
    """Wait until there is a snapshot of that step or of a later one."""
    end = time.monotonic() + 120
    while not any(found >= step for found, _ in find_snapshots(folder)):
        assert time.monotonic() < end, f"no step {step}: {find_snapshots(folder)}"
        time.sleep(0.05)


@pytest.mark.stress
def test_a_host_that_is_killed_and_replaced_leaves_the_same_bits(
    hosts: Networks, data_dir: Path, tmp_path: Path
) -> None:
    def start(host: Host, name: str) -> Popen[str]:
        return drain(
            host.join_elastic("2:2", 1, "run", TRAIN, data_dir, tmp_path / name, 10, 10, 300, 3)
        )

    network = hosts(2)
    for program in [start(host, "undisturbed") for host in network.hosts]:
        assert program.wait(timeout=300) == 0
    survivor, _ = [start(host, "killed") for host in network.hosts]
    for step in (20, 50):
        await_step(tmp_path / "killed", step)
        network.hosts[1].kill()
        replacement = start(network.hosts[1], "killed")
    assert [survivor.wait(timeout=300), replacement.wait(timeout=60)] == [0, 0]
    assert compare(0, 1, tmp_path / "undisturbed", tmp_path / "killed").differing == 0
