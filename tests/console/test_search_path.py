"""Files of somebody's own that are called like modules of the library do not stand in for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from playground.console import script


@pytest.fixture
def own_files(tmp_path: Path) -> Path:
    """A folder with modules that end the program that imports them."""
    for name in ("queue", "random", "torch", "socket", "rich", "click"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}.py')\n")
    return tmp_path


@pytest.mark.stress
def test_own_files_in_the_working_folder_are_left_alone(own_files: Path) -> None:
    root = Path(script.__file__).parents[2]  # as if the package were not installed, too
    environ = {**os.environ, "PYTHONPATH": f"{root}"}
    command = [sys.executable, "-m", "playground", "hello", "-n", "1"]
    done = subprocess.run(command, cwd=own_files, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Shown: " in done.stdout


@pytest.mark.parametrize(
    ("argv", "orig_argv", "moved"),
    [
        (["-m", "hello"], ["python", "-m", "playground", "hello"], True),
        (["-m", "hello"], ["python", "-um", "playground", "hello"], True),
        (["-m"], ["python", "-mplayground"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["/x/pytest/__main__.py"], ["python", "-m", "pytest", "playground"], False),
        (["playground", "hello"], ["python", "script.py"], False),
    ],
)
def test_the_folder_moves_for_our_command_alone(
    argv: list[str], orig_argv: list[str], moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    monkeypatch.setattr(sys, "path", ["/home/me", "/lib/python"])
    script.put_working_folder_last()
    assert sys.path == (["/lib/python", "/home/me"] if moved else ["/home/me", "/lib/python"])


def test_a_clone_goes_before_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages" / "playground").mkdir(parents=True)
    installed, clone = str(tmp_path / "site-packages"), str(Path(script.__file__).parents[2])
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "playground"])
    monkeypatch.setattr(sys, "path", [clone, "/lib/python", installed, "/more"])
    script.put_working_folder_last()
    assert sys.path == ["/lib/python", clone, installed, "/more"]
