"""BERT trained by ranks that are killed, and go on from snapshots: the end has the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from playground import launch
from playground.lessons.bert import lesson, resumable
from playground.lessons.bert.history import History
from playground.lessons.bert.settings import DDP, WAYS, BertSettings, Training
from playground.runtime import UsageError, restart_count
from playground.runtime.remote import remote
from playground.survival.folder import find_steps, step_folder
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import load_part
from playground.training.bert_config import BertConfig
from playground.training.bert_weights import WeightsSource
from playground.training.loader import run_training
from playground.training.sentence_pairs import grammar
from playground.training.sentence_pairs.prepare import PairsSource, prepare_pairs

Run = Callable[..., Any]
TRAIN = remote("playground.lessons.bert.resumable:train")
STEPS = 12
"""Two epochs of five steps, and two more."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairsSource:
    """A few generated pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "COUNTS", {"train": 60, "test": 20})
        return prepare_pairs("generated", tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def settings(pairs: PairsSource) -> BertSettings:
    """With dropout."""
    config = BertConfig(
        vocabulary=pairs.vocabulary, width=16, layers=2, heads=2, intermediate=32, max_length=32, dropout=0.1
    )
    return BertSettings(
        folder=pairs.folder, config=config, weights=WeightsSource("scratch", None, None, "for tests"), workers=2,
        batch_size=12, steps=STEPS, report_every=5, max_length=32,
    )  # fmt: skip


@pytest.fixture
def snapshots(tmp_path: Path) -> SnapshotSettings:
    return SnapshotSettings(folder=tmp_path / "snapshots", every=2)


Kill = tuple[int, int]
"""A rank, and the step after which it is killed."""


def train_and_die(rank: int, size: int, settings: BertSettings, snapshots: SnapshotSettings, kills: list[Kill]) -> Any:
    """Train with snapshots. Each time the world is started, the next of `kills` happens."""
    add, count = History.add, restart_count()

    def add_and_die(self: History, loss: torch.Tensor) -> None:
        add(self, loss)
        if (rank, len(self.losses) + len(self.own)) in kills[count : count + 1]:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "add", add_and_die)
        return run_training(rank, size, TRAIN, settings, (snapshots,))


def train(settings: BertSettings, snapshots: SnapshotSettings, *kills: Kill) -> Training:
    by_rank: list[Training] = launch(
        train_and_die, settings.ranks, args=(settings, snapshots, list(kills)), restarts=len(kills),
        on_restart=lambda failure, count: None,
    )  # fmt: skip
    return by_rank[0]


def end_of(snapshots: SnapshotSettings) -> dict[str, Any]:
    """What every file of the newest snapshot holds, but for times."""
    folder = step_folder(snapshots.folder, find_steps(snapshots.folder)[0])
    found = {file.name: load_part(file) for file in sorted(folder.glob("*.snapshot"))}
    assert found
    for part in (each["own"] for each in found.values()):
        for name in ("seconds", "unreported"):
            part.get("history", {}).pop(name, None)
    return found


def flatten(value: Any) -> list[Any]:
    """The plain values of a nested structure, with every tensor as its bytes."""
    if isinstance(value, torch.Tensor):
        return [value.contiguous().numpy().tobytes()]
    if isinstance(value, dict):
        value = [each for item in sorted(value.items(), key=str) for each in item]
    return [each for item in value for each in flatten(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize(
    ("workers", "kills"), [pytest.param(2, [(1, 7)], marks=pytest.mark.stress), (3, [(0, 3), (2, 11)])]
)
def test_the_end_has_the_same_bits(
    workers: int, kills: list[Kill], settings: BertSettings, snapshots: SnapshotSettings, tmp_path: Path
) -> None:
    undisturbed, asked = replace(snapshots, folder=tmp_path / "undisturbed"), settings.on(DDP, workers)
    expected, found = train(asked, undisturbed), train(asked, snapshots, *kills)
    assert flatten(end_of(snapshots)) == flatten(end_of(undisturbed))
    assert (found.losses, found.test_accuracy) == (expected.losses, expected.test_accuracy)
    assert find_steps(snapshots.folder) == [12, 10, 8]


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_leave_the_same_bits(
    seed: int, settings: BertSettings, snapshots: SnapshotSettings, tmp_path: Path
) -> None:
    random = Random(seed)
    asked = replace(settings.on(DDP, random.choice((1, 2, 3, 4))), loader_workers=seed % 2)
    kills = [(random.randrange(asked.workers), random.randint(1, STEPS)) for _ in range(5)]
    every = random.randint(1, 4)
    undisturbed = replace(snapshots, folder=tmp_path / "undisturbed", every=every)
    train(asked, undisturbed)
    train(asked, replace(snapshots, every=every), *kills)
    assert flatten(end_of(snapshots)) == flatten(end_of(undisturbed))


@pytest.mark.parametrize("way", ["data-parallel", pytest.param("loss-in-forward", marks=pytest.mark.stress)])
def test_ways_of_one_process_go_on_too(
    way: str, settings: BertSettings, snapshots: SnapshotSettings, tmp_path: Path
) -> None:
    """Without dropout, whose masks the threads of the devices draw in any order."""
    undisturbed = replace(snapshots, folder=tmp_path / "undisturbed")
    asked = replace(settings, config=replace(settings.config, dropout=0.0), steps=6).on(way)
    train(asked, undisturbed)
    train(asked, snapshots, (0, 5))
    assert flatten(end_of(snapshots)) == flatten(end_of(undisturbed))


def test_snapshots_change_nothing(settings: BertSettings, snapshots: SnapshotSettings, world: Run) -> None:
    plain = world(2).run(lesson.train, settings)[0]
    assert train(settings, snapshots).losses == plain.losses


def test_a_run_that_ended_goes_on_for_more_steps(
    settings: BertSettings, snapshots: SnapshotSettings, tmp_path: Path
) -> None:
    train(replace(settings, steps=7), snapshots)
    again = train(replace(settings, steps=7), snapshots)
    assert (len(again.losses), find_steps(snapshots.folder)) == (7, [7, 6, 4])
    longer = train(settings, snapshots)
    at_once = replace(snapshots, folder=tmp_path / "at once")
    assert longer.losses == train(settings, at_once).losses
    assert flatten(end_of(snapshots)) == flatten(end_of(at_once))
    with pytest.raises(UsageError, match="--steps 7 from a snapshot of step 12: ask for 12 or more"):
        train(replace(settings, steps=7), snapshots)
    shorter = replace(snapshots, resume=str(step_folder(snapshots.folder, 8)))
    assert train(replace(settings, steps=8), shorter).losses == longer.losses[:8]


@pytest.fixture
def bert(run_cli: Run, pairs: PairsSource, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on these pairs."""
    monkeypatch.setattr(grammar, "COUNTS", {"train": 60, "test": 20})
    data_dir = pairs.folder.parents[1]

    def run(*words: Any) -> Any:
        return run_cli("bert", "--data-dir", data_dir, "--steps", 3, "--batch-size", 8, *words)

    return run


def test_each_way_has_a_folder_of_its_own(bert: Run, tmp_path: Path) -> None:
    words = ("--only", "train", "--snapshots", tmp_path, "--snapshot-every", 2)
    assert bert(*words).code == 0
    assert {way: find_steps(tmp_path / way) for way in WAYS} == {way: [3, 2] for way in WAYS}
    again = bert(*words, "--steps", 4)
    assert (again.code, again.out.count("going on after step 3")) == (0, len(WAYS))
    refused = bert(*words, "--resume", tmp_path / DDP / "step-00000002")
    assert (refused.code, refused.out) == (2, "")
    assert "a snapshot is of one way, add --way" in refused.err


def test_a_failure_is_told_in_a_line(bert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--way", DDP, "--only", "train", "--snapshots", tmp_path, "--restarts", 1, "--report-every", 1, "--json")
    monkeypatch.setattr("playground.lessons.bert.page.TRAIN_ON", die_once)
    shown = bert(*words)
    assert (shown.code, shown.err) == (0, "rank 1 of 2 was killed by SIGKILL; restart 1 of 1\n")
    [training] = json.loads(shown.out)["parts"]["train"]
    assert len(training["losses"]) == 3


def die_once(rank: int, size: int, settings: BertSettings, snapshots: SnapshotSettings) -> Training:
    if rank == 1 and not restart_count():
        os.kill(os.getpid(), signal.SIGKILL)
    return resumable.train(rank, size, settings, snapshots)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lr", 0.5), "lr is 0.001 in the snapshot and 0.5 here"),
        (("--dropout", 0.2), "config.dropout is 0.0 in the snapshot and 0.2 here"),
        (("--resume", "no"), "holds snapshots (up to step 3)"),
        (("--only", "memory"), "--snapshots has no effect without the part train: add --only train"),
    ],
)
def test_what_goes_on_from_nothing_is_refused(words: tuple[Any, ...], message: str, bert: Run, tmp_path: Path) -> None:
    start = ("--way", DDP, "--snapshots", tmp_path)
    assert bert(*start, "--only", "train").code == 0
    shown = bert(*start, *(() if "--only" in words else ("--only", "train")), *words)
    assert shown.code == 2
    assert message in shown.err
