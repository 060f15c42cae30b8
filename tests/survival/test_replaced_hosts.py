"""Hosts without a shared disk, one of which is killed and replaced: the end is as if nobody had disturbed them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from hosts import Host, Network

from playground.survival.folder import find_steps, step_folder
from playground.survival.manifest import rank_file
from playground.survival.snapshots import load_part

Networks = Callable[..., Network]
STEPS = 90
TRAIN = ("sgd", "--dataset", "digits", "--limit", 300, "--batch-size", 10, "--epochs", STEPS // 30)


def drain(program: Popen[str]) -> Popen[str]:
    """Read what a program says, lest it wait for a reader."""
    for stream in (program.stdout, program.stderr):
        assert stream
        threading.Thread(target=stream.read, daemon=True).start()
    return program


def await_step(folder: Path, step: int) -> None:
    """Wait until there is a snapshot of that step or of a later one."""
    end = time.monotonic() + 120
    while not any(found >= step for found in find_steps(folder)):
        assert time.monotonic() < end, f"no step {step}: {find_steps(folder)}"
        time.sleep(0.05)


def parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_part(step_folder(folder, step) / rank_file(0))["shared"]["model"]


@pytest.mark.stress
def test_a_host_that_is_killed_and_replaced_leaves_the_same_bits(
    hosts: Networks, data_dir: Path, tmp_path: Path
) -> None:
    def start(host: Host, folder: Path) -> Popen[str]:
        words = (*TRAIN, "--data-dir", data_dir, "--snapshots", folder, "--snapshot-every", 10)
        return drain(host.join_elastic("2:2", 1, *words))

    network = hosts(2)
    undisturbed, disk = tmp_path / "undisturbed", tmp_path / "disk"
    for program in [start(host, undisturbed) for host in network.hosts]:
        assert program.wait(timeout=300) == 0
    network.give_own_disks(disk)
    second = network.hosts[1]
    own = [network.real_folder(host) / "snapshots" for host in network.hosts]
    survivor, _ = [start(host, disk / "snapshots") for host in network.hosts]
    for step, folder in ((20, own[0]), (50, own[1])):
        await_step(folder, step)
        second.kill()
        replacement = start(second, disk / "snapshots")
    assert [survivor.wait(timeout=300), replacement.wait(timeout=60)] == [0, 0]
    expected = parameters(undisturbed, STEPS)
    for folder in own:
        found = parameters(folder, STEPS)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert find_steps(disk / "snapshots") == []
