"""The page "GPUs" shows functions of its program about streams, and what it is told."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import COLD

from playground.base.remote import ROOT
from playground.world.simulated_gpu.environment import GPUS

PROGRAM = ROOT / "playground" / "lessons" / "gpu_streams.py"
PAGE = (PROGRAM.parent / "gpus.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### A missing wait, and its repair")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_the_page_shows_functions_of_the_program() -> None:
    source = PROGRAM.read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    shown = [f"{ast.get_source_segment(source, function)}\n" for function in functions[1:]]
    assert blocks("python") == shown


@pytest.mark.gpu
@pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone")
def test_it_prints_and_is_told_what_the_page_says(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    [block], [told] = blocks("console"), [each for each in blocks("") if "missing" in each]
    command, _, output = block.partition("\n")
    words = [sys.executable, *command.removeprefix("$ python ").split()]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=3 * COLD, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, output), ran.stderr
    _, _, missing = " ".join(told.split()).partition("ranks 0-1: ")
    assert missing in " ".join(ran.stderr.split())
    assert ran.stderr.count("To fix it") == 2  # functions
