"""--snapshots and --restarts of commands that train."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run

from playground.checkpoint.folder import find_snapshots, lock_folder


@pytest.fixture
def train(run_cli: Run, data_dir: Path, tmp_path: Path) -> Run:
    """Training of a few steps, with snapshots."""

    def run(command: str, *words: Any) -> Any:
        data = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 256)
        return run_cli(
            command, *data, "--snapshots", tmp_path / "snapshots", "--snapshot-every", 1, *words
        )

    return run


def test_training_goes_on_where_it_was(train: Run, tmp_path: Path) -> None:
    first = json.loads(train("ddp", "--epochs", 1, "--json").out)
    assert [step for step, _ in find_snapshots(tmp_path / "snapshots")] == [2, 1]
    second = json.loads(train("ddp", "--epochs", 2, "--json").out)
    assert second["epochs"][0] == first["epochs"][0]
    assert len(second["epochs"]) == 2
    shown = train("ddp", "--epochs", 3)
    assert "going on after step 0 of epoch 3" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line[:8].strip().isdigit()] == [
        "1",
        "2",
        "3",
    ]


def test_another_run_is_refused_by_what_differs(train: Run, tmp_path: Path) -> None:
    assert train("ddp", "--epochs", 1).code == 0
    shown = train("ddp", "--epochs", 1, "--lr", 0.5)
    assert shown.code == 2
    assert "lr is 0.01 in the snapshot and 0.5 here" in shown.err


def test_a_folder_that_cannot_be_made_is_named(
    run_cli: Run, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    words = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 256, "--epochs", 1)
    shown = run_cli("ddp", *words, "--snapshots", tmp_path / "file" / "snapshots")
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert str(tmp_path / "file") in shown.err


def test_a_snapshot_that_cannot_be_written_is_a_line_and_training_goes_on(
    train: Run, tmp_path: Path
) -> None:
    (tmp_path / "snapshots" / ".unfinished").mkdir(parents=True)  # in the way
    shown = train("ddp", "--epochs", 1, "--snapshot-every", 2, "--json")
    assert (shown.code, len(json.loads(shown.out)["epochs"])) == (0, 1)
    why = f"{tmp_path / 'snapshots'} cannot be written to (Is a directory)"
    assert shown.err == f"step 2 has no snapshot: {why}; training went on\n"


@pytest.mark.stress
def test_a_folder_in_which_another_run_writes_is_refused_in_a_line(
    train: Run, tmp_path: Path
) -> None:
    """After a second, in which that run may end: see tests/checkpoint/test_snapshots.py."""
    (tmp_path / "snapshots").mkdir()
    lock = lock_folder(tmp_path / "snapshots")
    shown = train("ddp", "--json")
    os.close(lock)
    todo = "wait for its end, or choose another folder"
    why = f"snapshots in {tmp_path / 'snapshots'}: another run is writing its own there; {todo}"
    assert (shown.code, shown.out, shown.err) == (2, "", f"playground: {why}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("ddp", "--snapshots", ""),
        ("ddp", "--data-dir", ""),
        ("hello", "--see", ""),
        ("bench", "--plot", ""),
        ("bench", "--diff", "", "a.json"),
        ("see", ""),
    ],
)
def test_an_empty_path_is_refused(
    words: tuple[str, ...], run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the working folder."""
    monkeypatch.chdir(tmp_path)
    shown = run_cli(*words)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "the path is empty" in shown.err
    assert list(tmp_path.iterdir()) == []
