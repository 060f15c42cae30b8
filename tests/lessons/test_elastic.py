"""elastic: the training that is killed ends with the bits of the one that is not, wherever the kill
comes; a snapshot is whole; and hosts leave and join."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from processes import ENOUGH, by_hand, free_port

from playground import launch
from playground.base.errors import RankFailed
from playground.lessons.elastic import hosts, lesson
from playground.training.prepare import DATA_DIR

elastic: Any = lesson
STEPS, BATCH, EVERY = 4, 8, 3
"""Steps of each of two epochs, images of a step, and steps between two snapshots."""


class Killed(Exception):
    """Ends a training after a step."""


def resume_after_each_step(rank: int, size: int, data: Path, folder: Path) -> list[int]:
    """Train until all ranks are killed after a step, and go on. Returns the steps after which that
    ends with other bits than the training that nobody kills."""

    def kill(*_: int) -> None:
        raise Killed

    constants = {"IMAGES": STEPS * BATCH, "BATCH_SIZE": BATCH, "SAVE_EVERY": EVERY}
    traces = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(None):
        patch.setenv(DATA_DIR, str(data))
        for name, value in constants.items():
            patch.setattr(elastic, name, value)
        patch.setattr(elastic, "kill_last_rank", kill)
        expected = elastic.train(rank, size).state_dict()
        for step in range(1, 2 * STEPS + 1):
            patch.setattr(elastic, "KILL_AFTER", step)
            with contextlib.suppress(Killed):
                elastic.train_from_snapshot(rank, size, folder / f"{step}.pt")
            dist.barrier()  # the ranks that start again come after the old ones have ended
            assert (folder / f"{step}.pt").exists() == (step >= EVERY)
            patch.setattr(elastic, "KILL_AFTER", 0)
            found = elastic.train_from_snapshot(rank, size, folder / f"{step}.pt")[0].state_dict()
            if not all(found[name].equal(expected[name]) for name in expected):
                traces.append(step)
    return traces


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 4))]
)
def test_it_resumes_after_any_step_with_the_same_bits(
    size: int, world: Worlds, digits_folder: Path, tmp_path: Path
) -> None:
    """In the first epoch, at its end, and in the second."""
    data = digits_folder.parents[1]
    assert world(size).run(resume_after_each_step, data, tmp_path) == [[]] * size
    assert len([*tmp_path.iterdir()]) == 2 * STEPS  # and no part of one


def test_a_snapshot_has_what_each_rank_has_of_its_own(
    world: Worlds, digits_folder: Path, tmp_path: Path
) -> None:
    world(2).run(resume_after_each_step, digits_folder.parents[1], tmp_path)
    snapshot = torch.load(tmp_path / "8.pt")
    assert snapshot["step"] == 2 * STEPS // EVERY * EVERY
    one, other = snapshot["random_states"]
    assert not one.equal(other)
    assert all("momentum_buffer" in each for each in snapshot["optimizer"]["state"].values())


def save_and_load(rank: int, size: int, file: Path, to_save: bool) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if to_save:
        elastic.save(file, model, optimizer, 1)
    else:
        elastic.load(file, model, optimizer)


def test_a_snapshot_of_another_number_of_ranks_is_refused(world: Worlds, tmp_path: Path) -> None:
    """It has a random state for each of its ranks."""
    file = tmp_path / "snapshot.pt"
    world(2).run(save_and_load, file, True)
    for size in (1, 3):
        with pytest.raises(RankFailed, match="the snapshot is of 2 ranks"):
            world(size).run(save_and_load, file, False)


@pytest.mark.parametrize("call", ["save", "fsync", "replace"])
def test_a_kill_while_a_snapshot_is_written_leaves_the_snapshot_before(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        if call == "save":
            args[1].write(b"half of it")
        raise Killed

    file = tmp_path / "snapshot.pt"
    elastic.write(file, {"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(torch if call == "save" else os, call, die)
        with pytest.raises(Killed):
            elastic.write(file, {"step": 2})
    assert torch.load(file) == {"step": 1}
    elastic.write(file, {"step": 3})
    assert torch.load(file) == {"step": 3}
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "snapshot.pt", list[int]()

    def sync(descriptor: int) -> None:
        assert not file.exists()
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", sync)
    elastic.write(file, {"step": torch.arange(10_000)})
    assert synced == [file.stat().st_size]


@pytest.mark.usefixtures("few_digits")
def test_ranks_that_somebody_else_has_started_are_not_killed() -> None:
    """Nobody starts them again here."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "playground", "elastic"),
            *("--images", "256", "--epochs", "1", "--kill-after", "1"),
        ],
        env={**os.environ, **by_hand(0, 1, str(free_port()))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "is killed" not in done.stdout
    assert done.stdout.endswith("from a training that was not killed 0e+00\n")


def test_the_number_of_ranks_changes_and_the_losses_do_not(tmp_path: Path) -> None:
    """Each start resumes from the newest snapshot, so that steps after it are taken twice."""
    undisturbed = dict(launch(hosts.run, 2, args=(tmp_path / "undisturbed.pt",))[0])
    starts, losses = [], dict[int, float]()
    for size, end in ((2, 30), (1, 61), (2, 100)):
        taken = launch(hosts.run, size, args=(tmp_path / "changing.pt", end))[0]
        starts.append(taken[0][0])
        losses |= dict(taken)
    assert starts == [1, 29, 61]
    assert losses == pytest.approx(undisturbed, abs=1e-6, rel=0)
    assert undisturbed[100] < undisturbed[1] / 2


@pytest.mark.stress
def test_a_host_leaves_and_another_joins(tmp_path: Path) -> None:
    """Two agents of torchrun, of which the second is ended and later started again. (More steps
    than any machine takes meanwhile: nothing here ends by itself.)"""
    said, port = tmp_path / "said.txt", free_port()
    agents: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        rendezvous = [
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        ]
        soon = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        soon += f",join_timeout=120,is_host={int(not agents)}"
        words = ["--nnodes=1:2", "--local-addr=127.0.0.1", "--max-restarts=10", *rendezvous, soon]
        program = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            hosts.__file__,
            f"{tmp_path}/snapshot.pt",
        ]
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with said.open("ab") as file:
            return subprocess.Popen(
                [*program, "5000"], env=environ, stdout=file, stderr=subprocess.DEVNULL
            )

    def taken() -> list[tuple[int, int, float]]:
        found = re.findall(
            r"^step (\d+), world size (\d): loss ([\d.]+)$", said.read_text(), re.MULTILINE
        )
        return [(int(step), int(size), float(loss)) for step, size, loss in found]

    try:
        agents.append(start())
        for size in (2, 1, 2):
            before, end = len(taken()), time.monotonic() + 4 * ENOUGH
            if size == 1:
                agents[-1].send_signal(signal.SIGTERM)
            else:
                agents.append(start())
            while [ranks for _, ranks, _ in taken()[before:]].count(size) < 6:
                assert time.monotonic() < end, said.read_text()
                assert agents[0].poll() is None
                time.sleep(0.1)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait()
    losses = {step: loss for step, _, loss in taken()}
    undisturbed = dict(launch(hosts.run, 2, args=(tmp_path / "undisturbed.pt", max(losses)))[0])
    assert losses == pytest.approx(undisturbed, abs=1e-6, rel=0)
    assert [step for step, _, _ in taken()] != sorted(losses), "no step was taken again"
