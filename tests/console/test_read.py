"""Chapters in the terminal: every one, in 80 columns, with its code as it is; and they travel with the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminal import open_terminal
from widths import too_wide

from playground.app import CHAPTERS
from playground.console.rendering import FENCE, WIDEST, to_plain
from playground.runtime.remote import ROOT

Run = Callable[..., Any]


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_shown_whole(name: str, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = run_cli("read", name)
    assert (shown.code, shown.err, too_wide(shown.out)) == (0, "", [])
    text = CHAPTERS[name].read_text(encoding="utf-8")
    assert text.splitlines()[0].removeprefix("# ").replace("`", "") in " ".join(shown.out.split())
    prose = "".join(FENCE.split(to_plain(text, CHAPTERS[name].parent))[::2])
    assert not re.search(r"</?(details|summary)>|\]\((?!https?:)", prose)
    assert "\x1b" not in shown.out
    letters = "".join(shown.out.split())
    code = [line for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]
    assert [line for line in code if "".join(line.split()) not in letters] == []
    assert {line for line in code if len(line) <= WIDEST and line == line.lstrip()} <= {*shown.out.splitlines()}


def test_an_unknown_name_is_one_line(run_cli: Run) -> None:
    shown = run_cli("read", "juggling")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "'juggling' is not one of 'hello', " in shown.err


def test_torch_is_not_imported() -> None:
    read = "import sys; sys.modules['torch'] = None; from playground.app import main; main()"
    shown = subprocess.run([sys.executable, "-c", read, "read", "p2p"], capture_output=True, text=True, check=True)
    assert shown.stdout.lstrip().startswith("p2p: ")


def test_there_is_a_pager_on_a_terminal_only(tmp_path: Path) -> None:
    paged = tmp_path / "paged"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\nexec cat > {paged}\n")
    pager.chmod(0o700)
    command = [sys.executable, "-m", "playground", "read", "p2p"]
    environ = {**os.environ, "PAGER": str(pager), "TERM": "xterm"}
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    assert not paged.exists()
    with open_terminal() as terminal:
        subprocess.run(command, env=environ, stdin=terminal.stream, stdout=terminal.stream, check=True)
    assert "point-to-point" in paged.read_text()


def test_chapters_and_figures_travel_with_the_package(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "playground", tmp_path / "playground", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        names = {*wheel.namelist()}
    wanted = [file for file in (ROOT / "playground").rglob("*") if file.suffix in (".md", ".svg", ".ipynb", ".js")]
    assert {str(file.relative_to(ROOT)) for file in wanted} <= names
    assert {str(file.relative_to(ROOT)) for file in CHAPTERS.values()} <= names
