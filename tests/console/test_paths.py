"""Paths that are typed: none is empty, and none is relative to a folder that has been deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.console import paths

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
    shown = run_cli("ladder", "--plot", "rungs.svg")
    assert (shown.code, shown.out) == (2, "")
    assert "rungs.svg is relative to the working folder, which has been deleted: use a full path." in shown.err
    assert shown.err.count("\n") == 1
