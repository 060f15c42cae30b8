"""Files of somebody's own that are called like modules of the library do not stand in for them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import playground

ROOT = Path(playground.__file__).parents[1]


@pytest.fixture
def put_working_folder_last() -> Callable[[], None]:
    """What `python -m playground` does first. (The module is not imported here: `runpy` would warn
    of that.)"""
    found: Callable[[], None] = runpy.run_path(str(ROOT / "playground" / "__main__.py"))[
        "put_working_folder_last"
    ]
    return found


@pytest.fixture
def own_files(tmp_path: Path) -> Path:
    """A folder with modules that end the program that imports them."""
    for name in ("queue", "random", "torch", "socket", "rich", "click"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}.py')\n")
    return tmp_path


@pytest.mark.stress
def test_own_files_in_the_working_folder_are_left_alone(own_files: Path) -> None:
    root = ROOT  # as if the package were not installed, too
    environ = {**os.environ, "PYTHONPATH": f"{root}"}
    command = [sys.executable, "-m", "playground", "hello", "-n", "1"]
    done = subprocess.run(
        command, cwd=own_files, env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Rank 0 of 1 has gathered " in done.stdout


def test_the_working_folder_comes_last(
    put_working_folder_last: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["/home/me", "/lib/python"])
    put_working_folder_last()
    assert sys.path == ["/lib/python", "/home/me"]


def test_a_clone_goes_before_what_is_installed(
    put_working_folder_last: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages" / "playground").mkdir(parents=True)
    installed, clone = str(tmp_path / "site-packages"), str(ROOT)
    monkeypatch.setattr(sys, "path", [clone, "/lib/python", installed, "/more"])
    put_working_folder_last()
    assert sys.path == ["/lib/python", clone, installed, "/more"]
