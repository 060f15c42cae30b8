"""Paths that are typed: none is empty, and none is relative to a folder that has been deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.console import paths
from playground.runtime import UsageError

Run = Callable[..., Any]


@pytest.fixture
def deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, for the time of a test."""
    monkeypatch.setattr(paths, "_left", [])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


def test_a_deleted_working_folder_is_no_obstacle(run_cli: Run, deleted_folder: None, data_dir: Path) -> None:
    assert run_cli("p2p").code == 0
    assert os.getcwd() == os.sep
    shown = run_cli("sgd", "--dataset", "digits", "--data-dir", data_dir, "--limit", 64, "--epochs", 1)
    assert shown.code == 0, shown.err


def test_paths_relative_to_a_deleted_folder_are_refused(run_cli: Run, deleted_folder: None) -> None:
    shown = run_cli("bench", "--plot", "rungs.svg")
    assert (shown.code, shown.out) == (2, "")
    assert "rungs.svg is relative to the working folder, which has been deleted: use a full path." in shown.err
    assert shown.err.count("\n") == 1


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.svg"
    paths.check_writable("-o", file)
    assert not file.exists()
    file.write_text("old")
    paths.check_writable("-o", file)
    assert file.read_text() == "old"
    for path, why in ((Path("/nowhere/rows.svg"), "no such folder"), (Path("/"), "Is a directory")):
        with pytest.raises(UsageError, match=f"-o {path}.*{why}"):
            paths.check_writable("-o", path)
    monkeypatch.setattr(paths, "MIN_FREE", 2**80)
    with pytest.raises(UsageError, match=r"only [\d,]+ bytes are free"):
        paths.check_writable("-o", file)
