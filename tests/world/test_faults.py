"""Faults of whole runs, as processes of their own: Ctrl-C, SIGTERM, a killed parent or rank, many
runs at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures import Fork, Start
from processes import (
    ENOUGH,
    is_first_epoch,
    listening,
    session_ends,
    session_members,
    wait_until_begun,
)
from programs import ForkedProgram

from playground.explain.hang.box import find_boxes
from playground.training import prepare

TRAINING = ("sgd", "-n", "3", "--batch-size", "126", "--epochs", "100000")
"""Prints a line an epoch."""
MEASURING = (
    "bench",
    "-n",
    "3",
    "-b",
    "1M",
    "-e",
    "1M",
    "--algorithm",
    "backend",
    "--iterations",
    "100000",
)
"""Goes on for minutes, too, and starts in half the time: the optimizer of PyTorch imports its
compiler."""


def wait_for_ranks(process: subprocess.Popen[str] | ForkedProgram, count: int) -> list[int]:
    """The ranks of a run, which have flight recorders, as soon as they are `count` and meet each
    other."""
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        members = [int(pid) for pid in session_members(process.pid)]
        ranks = [view.pid for view in find_boxes(members)]
        if len(ranks) == count and all(listening([rank]) for rank in ranks):
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"no {count} ranks: {process.poll()}")


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def first_epoch(process: ForkedProgram) -> None:
    for line in process.stdout:
        if is_first_epoch(line):
            return
    raise AssertionError("it ended before its first epoch")


@pytest.mark.parametrize("moment", [0.3, "training"])
def test_ctrl_c_at_any_moment(
    moment: float | str,
    start_cli: Start,
    fork_program: Fork,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process: Any
    monkeypatch.setenv(prepare.DATA_DIR, str(data_dir))
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))  # MNIST is out of reach
    if isinstance(moment, float):
        process = start_cli(*TRAINING)
        time.sleep(moment)
        wait_until_begun(process)  # on a busy machine it takes longer
    else:
        process = fork_program("playground", *TRAINING)
        first_epoch(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them at once
    _, err = process.communicate(timeout=ENOUGH)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1:] == ["playground: interrupted"]
    assert "Traceback" not in err, err
    assert session_ends(process.pid)


INTERRUPTED_IN_TEXT = """
import os, signal, sys
from playground.base import signals

signals.handle_termination()
try:
    exec("os.kill(os.getpid(), signal.SIGINT); [None for _ in range(10**6)]")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_the_exit_code_after_ctrl_c_is_the_program_s(tmp_path: Path) -> None:
    """Also if it came while Python ran code that it was given as text, as it does wherever a
    dataclass is made."""
    (tmp_path / "program.py").write_text(INTERRUPTED_IN_TEXT)
    assert subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path).returncode == 130


DROPPING = (
    "import os\ntry: os.kill(os.getpid(), {}), [None for _ in range(10**6)]\nexcept "
    "BaseException: pass"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_in_an_import_that_drops_exceptions(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As that of torch does, whose C++ imports numpy, and continues without it if that raises
    one."""
    (tmp_path / "dropping.py").write_text(DROPPING.format(number.value))
    program = "from playground.base import signals; signals.handle_termination(); import dropping"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, timeout=ENOUGH
    )
    assert ended.returncode == 128 + number
    assert ended.stderr == b"playground: interrupted\n" * (number == signal.SIGINT)


EARLY = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
runpy.run_module("playground", run_name="__main__")
"""


def test_ctrl_c_before_the_command_is_imported_is_a_line() -> None:
    ended = subprocess.run([sys.executable, "-c", EARLY], stderr=subprocess.PIPE, timeout=ENOUGH)
    assert (ended.returncode, ended.stderr) == (130, b"playground: interrupted\n")


def test_the_death_of_the_parent_takes_all_along(fork_program: Fork) -> None:
    process = fork_program("playground", *MEASURING)
    wait_for_ranks(process, 3)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=ENOUGH) == -signal.SIGKILL
    assert session_ends(process.pid)


def test_a_run_listens_on_loopback_only_and_a_killed_rank_ends_it(fork_program: Fork) -> None:
    process = fork_program("playground", *MEASURING)
    ranks = wait_for_ranks(process, 3)
    # 127.0.0.1 as the kernel writes it
    assert listening(map(int, session_members(process.pid))) == {"0100007F"}
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=ENOUGH)
    assert process.returncode == 1
    # behind it stands who waited for whom, if that was seen before the end
    assert any(line.endswith(" of 3 was killed by SIGKILL") for line in err.splitlines())
    assert session_ends(process.pid)


def test_a_killed_fork_server_ends_the_run(fork_program: Fork) -> None:
    process = fork_program("playground", *MEASURING)
    os.kill(parent_of(wait_for_ranks(process, 3)[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=ENOUGH)
    assert process.returncode == 1
    assert "is out of reach: the fork server it came from was killed" in err
    assert session_ends(process.pid)
