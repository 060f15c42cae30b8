"""Hosts that share no disk: each keeps whole snapshots of its own, and a run goes on from the newest that any has."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mortals import by_hand

from playground import launch
from playground.lessons.elastic.page import Kill
from playground.runtime import UsageError
from playground.runtime.host import SIMULATED_HOSTS
from playground.survival.comparison import last_snapshot
from playground.survival.folder import find_steps, step_folder
from playground.survival.hosts import find_sharers
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import State, load_all, tensors_in
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings


def on_own_disk(rank: int, size: int, folder: Path, disks: tuple[int, ...]) -> Path:
    """The folder of this rank's host; `disks` are the hosts' disks, by number."""
    return folder / f"disk-{disks[rank * len(disks) // size]}"


def train_on_hosts(
    rank: int, size: int, settings: TrainingSettings, disks: tuple[int, ...], kills: list[Kill]
) -> TrainingResult:
    assert settings.snapshots
    own = replace(settings.snapshots, folder=on_own_disk(rank, size, settings.snapshots.folder, disks))
    return by_hand(rank, size, replace(settings, snapshots=own), kills)


def find_sharers_on_hosts(rank: int, size: int, folder: Path, disks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return find_sharers(on_own_disk(rank, size, folder, disks)).members


@pytest.fixture
def settings(digits_folder: Path, tmp_path: Path) -> TrainingSettings:
    """Two epochs of five steps."""
    return TrainingSettings(
        folder=digits_folder, epochs=2, batch_size=32, limit=150,
        snapshots=SnapshotSettings(folder=tmp_path, every=2),
    )  # fmt: skip


def train(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    settings: TrainingSettings,
    disks: tuple[int, ...] = (0, 1),
    kills: tuple[Kill, ...] = (),
) -> None:
    """Train, each host with the disk of that number; the n-th time that the world is started, the n-th kill happens."""
    monkeypatch.setenv(SIMULATED_HOSTS, str(len(disks)))
    said: list[Any] = []
    launch(
        train_on_hosts, size, args=(settings, disks, list(kills)), restarts=len(kills),
        on_restart=lambda failure, count: said.append(count),
    )  # fmt: skip
    assert len(said) == len(kills)


def newest_on(settings: TrainingSettings, disk: int) -> tuple[int, list[State]]:
    """The newest snapshot on a disk, which is whole: its step and what it holds for every rank."""
    assert settings.snapshots
    folder = settings.snapshots.folder / f"disk-{disk}"
    found = last_snapshot(folder)
    return found.step, load_all(found)


def tensors_of(states: list[State]) -> list[torch.Tensor]:
    """All parameters, momenta, totals and random numbers."""
    return tensors_in([[state.shared, state.own] for state in states])


def is_equal(one: list[State], other: list[State]) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("disks", "members"),
    [((0, 0), ((0, 1, 2, 3),)), ((0, 1, 0, 2), ((0, 2), (1,), (3,)))],
)
def test_ranks_find_out_who_sees_the_same_folder(
    disks: tuple[int, ...], members: tuple[tuple[int, ...], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIMULATED_HOSTS, str(len(disks)))
    assert launch(find_sharers_on_hosts, 4, args=(tmp_path, disks)) == [members] * 4
    assert sorted(tmp_path.rglob("*")) == [tmp_path / f"disk-{disk}" for disk in sorted({*disks})]


def test_every_host_holds_the_same_whole_snapshots(settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    train(monkeypatch, 2, settings)
    ends = [newest_on(settings, disk) for disk in (0, 1)]
    assert [(step, len(states)) for step, states in ends] == [(10, 2), (10, 2)]
    assert is_equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"sync": "parameters", "sync_every": 3}, marks=pytest.mark.stress)]
)
def test_hosts_that_come_with_an_empty_or_an_older_disk_get_the_newest_from_another(
    options: dict[str, Any], settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, **options)
    train(monkeypatch, 2, settings)
    step, undisturbed = newest_on(settings, 0)
    assert settings.snapshots
    for folder in (settings.snapshots.folder / f"disk-{disk}" for disk in (0, 1)):
        shutil.rmtree(step_folder(folder, 10))
    shutil.rmtree(step_folder(settings.snapshots.folder / "disk-0", 8))
    train(monkeypatch, 2, settings, disks=(0, 1))  # rank 0 had step 6, rank 1 step 8
    train(monkeypatch, 2, replace(settings, epochs=2), disks=(2, 1))  # rank 0 comes with nothing
    assert [newest_on(settings, disk)[0] for disk in (0, 1)] == [step, step]
    assert all(is_equal(newest_on(settings, disk)[1], undisturbed) for disk in (0, 1))


@pytest.mark.stress
def test_a_killed_rank_leaves_the_same_bits(settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    train(monkeypatch, 2, settings, disks=(0, 0))
    train(monkeypatch, 2, settings, disks=(1, 2), kills=(Kill(1, 5), Kill(0, 9)))
    undisturbed = newest_on(settings, 0)[1]
    assert all(is_equal(newest_on(settings, disk)[1], undisturbed) for disk in (1, 2))


def test_another_run_s_snapshot_on_one_host_is_told_to_all(
    settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, 1, replace(settings, lr=0.5), disks=(1,))
    with pytest.raises(UsageError, match=r"disk-1/step-00000010 is of another run: lr is 0\.5 in the snapshot"):
        train(monkeypatch, 2, settings)


def test_a_snapshot_by_name_need_not_lie_on_every_host(
    settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, 2, settings, disks=(0, 0))
    undisturbed = newest_on(settings, 0)[1]
    assert settings.snapshots
    by_name = replace(settings.snapshots, resume=str(step_folder(settings.snapshots.folder / "disk-0", 8)))
    train(monkeypatch, 2, replace(settings, snapshots=by_name), disks=(0, 1))
    assert find_steps(settings.snapshots.folder / "disk-1") == [10]
    assert is_equal(newest_on(settings, 1)[1], undisturbed)
