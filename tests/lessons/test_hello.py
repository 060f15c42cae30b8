"""hello, started by hand: its file starts the ranks, as torchrun does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import Run
from processes import ENOUGH
from test_readme import fenced_blocks

from playground.lessons.hello import lesson
from playground.site.texts import CHAPTERS

COMPARE = "    difference = "


def start_by_hand(file: Path) -> subprocess.CompletedProcess[str]:
    """Each rank writes its lines at once, when it ends: they share a pipe."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(file)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ENOUGH)


def test_started_by_hand_it_starts_four_ranks_which_meet(tmp_path: Path) -> None:
    done = start_by_hand(Path(shutil.copy(lesson.__file__, tmp_path)))
    assert done.returncode == 0, done.stderr
    places = re.findall(r"Process (\d+) has RANK=(\d) LOCAL_RANK=\2 WORLD_SIZE=4", done.stdout)
    ids = [int(process) for process, _ in sorted(places, key=lambda place: place[1])]
    assert len(ids) == 4
    for rank in range(4):
        assert f"Rank {rank} of 4 has gathered the process ids {ids}\n" in done.stdout


def test_a_rank_that_fails_is_told_by_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "lesson.py"
    text = Path(lesson.__file__).read_text(encoding="utf-8")
    assert text.count(COMPARE) == 1
    file.write_text(text.replace(COMPARE, f"    assert rank != 1, 'no disk'\n{COMPARE}"))
    done = start_by_hand(file)
    assert done.returncode == 1
    assert "AssertionError: no disk" in done.stderr
    assert re.search(r"the exit codes of the ranks are \[\d, (1|-6), \d, \d\]", done.stderr)


def test_run_names_the_rank_that_fails_in_the_shortest_program(
    tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CHAPTERS["hello"].read_text(encoding="utf-8")
    python = fenced_blocks(text, "python")
    [program] = [block for block in python if block.startswith("import torch.distributed")]
    failure = 'if rank == 1: raise RuntimeError("no disk")'
    assert failure in text
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(program, encoding="utf-8")
    right = run_cli("run", "-n", 3, "train.py")
    assert (right.code, len(right.out.splitlines())) == (0, 3), right.err
    Path("train.py").write_text(program.replace("dist.barrier", f"{failure}\ndist.barrier"))
    wrong = run_cli("run", "-n", 3, "train.py")
    told = "rank 1 of 3 failed: RuntimeError: no disk"
    assert told in text
    assert (wrong.code, wrong.err.splitlines()[0]) == (1, f"playground: {told}")
