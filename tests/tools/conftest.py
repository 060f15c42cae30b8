"""Scripts under `run`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from fixtures import Fork, Ran, Save
from processes import ENOUGH, session_ends
from programs import Outcome


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """`save(text, name)`: a script of this text in the working folder, which is a new one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


@pytest.fixture
def run_it(fork_program: Fork) -> Ran:
    """`run_it(words…)`: how `playground run words…` ends. Two ranks, unless -n says otherwise."""

    def run(*words: Any, **environ: str) -> Outcome:
        size = () if "-n" in words else ("-n", 2)
        program = fork_program("playground", "run", *size, *words, **environ)
        out, err = program.communicate(timeout=ENOUGH)
        assert session_ends(program.pid)
        return Outcome(program.returncode, out, err)

    return run
