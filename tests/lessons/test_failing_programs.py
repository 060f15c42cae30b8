"""The programs of chapters that fail do what the chapters say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ENOUGH, free_port
from test_readme import fenced_blocks

from playground.site.texts import CHAPTERS

pytestmark = pytest.mark.stress
FAILURE = '    if rank == 1: raise RuntimeError("no disk")\n'


def blocks(chapter: str, language: str) -> list[str]:
    return fenced_blocks(CHAPTERS[chapter].read_text(encoding="utf-8"), language)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that a test starts: all their processes end with it."""
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def fail_in(function: str, folder: Path) -> subprocess.Popen[str]:
    """Start the tutorial's program, in hello, with rank 1 failing at the beginning of a
    function."""
    [program] = [block for block in blocks("hello", "python") if "mp.Process" in block]
    text = program.replace("29500", str(free_port()))
    text, changes = re.subn(rf"^def {function}\(.*\n", rf"\g<0>{FAILURE}", text, flags=re.MULTILINE)
    assert changes == 1
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, file], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_rank_that_fails_before_the_rendezvous_leaves_the_others_waiting(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    program = fail_in("init_process", tmp_path)
    started.append(program)
    assert program.stderr
    for line in program.stderr:
        if line == "RuntimeError: no disk\n":
            break
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=3)


def test_a_rank_that_fails_later_is_not_in_the_exit_code(tmp_path: Path) -> None:
    program = fail_in("run", tmp_path)
    _, complaints = program.communicate(timeout=ENOUGH)
    assert "RuntimeError: no disk" in complaints
    assert "Connection closed by peer" in complaints
    assert program.returncode == 0


def test_torchrun_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    """And ends with an error; the report has the lines that the chapter shows."""
    [program] = [block for block in blocks("hello", "python") if "\ndist.barrier()\n" in block]
    [report] = [block for block in blocks("hello", "text") if "Root Cause" in block]
    failing = program.replace("dist.barrier()", f"{FAILURE.strip()}\ndist.barrier()")
    (tmp_path / "train.py").write_text(failing, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=3", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=ENOUGH,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    shown = [line.strip() for line in report.splitlines() if "…" not in line]
    for line in (line for line in shown if "SIGTERM" not in line):
        assert re.sub(r"pid: \d+", "pid", line) in re.sub(r"pid: \d+", "pid", done.stderr)


def test_the_report_of_two_ranks_that_send_first(tmp_path: Path) -> None:
    [program] = [block for block in blocks("p2p", "python") if "Deadlock" in block]
    [report] = [block for block in blocks("p2p", "text") if block.startswith("deadlock")]
    (tmp_path / "swap.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "swap.py"], cwd=tmp_path, capture_output=True, text=True, timeout=ENOUGH
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"\d+\.\d s", "T", done.stdout) == re.sub(r"\d+\.\d s", "T", report)
