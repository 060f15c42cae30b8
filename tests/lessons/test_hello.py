"""hello, started by hand: its file starts the ranks, as torchrun does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from processes import ENOUGH

from playground.lessons.hello import lesson

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
    assert re.search(r"the exit codes of the ranks are \[\d, 1, \d, \d\]", done.stderr)
