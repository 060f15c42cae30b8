"""The page GPUs: its programs are those that it shows, and print what it says on simulated GPUs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from fixtures import Start
from gpus import COLD, NONE

from playground.base.remote import ROOT
from playground.world.simulated_gpu.environment import GPUS

FOLDER = ROOT / "playground" / "lessons"
PAGE = (FOLDER / "gpus.md").read_text(encoding="utf-8")
PROGRAMS = sorted(
    {*FOLDER.glob("gpu_*.py")} - {FOLDER / "gpu_streams.py"}
)  # test_gpu_streams.py has that one


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_page_shows_the_whole_of_its_programs(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    assert f"```python\n{text}```" in PAGE
    assert len(text.splitlines()) <= 60


@pytest.mark.gpu
@pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_prints_what_the_page_shows(program: Path, start_cli: Start) -> None:
    shown = re.search(
        rf"```console\n\$ python -m playground (run [^\n]*{program.name})\n(.*?)```",
        PAGE,
        re.DOTALL,
    )
    assert shown, "the page shows no run"
    words = shlex.split(shown[1].replace(program.name, str(program)))
    process = start_cli(*words, **NONE)
    out, err = process.communicate(timeout=COLD)
    assert process.returncode == 0, err
    _, _, said = err.partition("\n")  # that the GPUs are simulated
    lines = sorted(out.splitlines()), said.strip().splitlines()
    expected, _, table = shown[2].partition("\n\n")
    assert lines == (sorted(expected.splitlines()), table.strip().splitlines())
