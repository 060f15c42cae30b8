"""`run`: a script for torchrun has one clear outcome, and nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import ENOUGH, session_ends

from playground.runtime.errors import UsageError
from playground.runtime.program import Program
from playground.runtime.remote import file_of
from playground.tools.failures.page import DEADLOCK, FAILURE, PROGRAMS, STALL, TIMEOUT, find
from playground.tools.run.page import to_torchrun

Run = Callable[..., Any]
Start = Callable[..., subprocess.Popen[str]]
RANK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
FORMS = RANK + "import torch, torch.distributed as dist\n"
DUMP = """
import json, os, sys
main = sys.modules["__main__"]
about = [sys.argv, os.getcwd(), sys.path, sys.orig_argv[1:], main.__file__, main.__spec__]
print(json.dumps([dict(os.environ), about]))
"""
OURS = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCH_CPP_LOG_LEVEL",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "_",
}
"""What differs from torchrun's environment: playground/runtime/program.py says why."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import missing_module", 1, "No module named 'missing_module'"),
        ("def broken(:", 2, "train.py, line 1"),
        (RANK + "sys.exit(3 * (rank == 1))", 1, "rank 1 of 3 failed: SystemExit: 3"),
        (RANK + "rank == 2 and sys.exit(0)", 0, ""),
        (RANK + "rank == 1 and os.kill(os.getpid(), 9)", 1, "rank 1 of 3 was killed by SIGKILL"),
        (
            FORMS + "rank == 2 and sys.exit(0)\ndist.init_process_group('gloo')",
            1,
            "rank 2 has finished where ranks 0-1 are in init_process_group",
        ),
    ],
)
def test_a_script_that_ends_badly_has_one_clear_outcome(
    run_cli: Run, script: Callable[[str], str], text: str, code: int, told: str
) -> None:
    shown = run_cli("run", "-n", 3, script(text))
    assert shown.code == code
    assert told in " ".join(shown.err.split())


def test_a_script_that_does_not_exist_is_refused_before_anything_is_started(
    run_cli: Run, script: Callable[[str], str]
) -> None:
    assert run_cli("run", "nothing.py").code == 2
    assert run_cli("run", "-m", "nothing_of_that_name").code == 2
    with pytest.raises(UsageError, match="no such file"):
        Program(name="nothing.py").locate()


def test_what_follows_the_script_is_its_own(run_cli: Run, script: Callable[[str], str]) -> None:
    name = script("import sys; print(sys.argv)")
    shown = run_cli("run", "-n", 1, name, "-n", 5, "--", "--dry")
    assert shown.out == "['train.py', '-n', '5', '--', '--dry']\n"


def test_output_goes_to_files(run_cli: Run, script: Callable[[str], str], tmp_path: Path) -> None:
    name = script(RANK + "print(rank)")
    assert run_cli("run", "-n", 2, "--output", "files", tmp_path / "out", name).out == ""
    assert (tmp_path / "out" / "rank1.stdout").read_text() == "1\n"
    assert run_cli("run", "-n", 2, "--output", "first", name).out == "0\n"


def test_it_reads_stdin(script: Callable[[str], str]) -> None:
    words = [sys.executable, "-m", "playground", "run", "-n", "1"]
    words.append(script("import sys; print(sys.stdin.read())"))
    shown = subprocess.run(words, input="hello", capture_output=True, text=True, timeout=ENOUGH)
    assert (shown.returncode, shown.stdout) == (0, "hello\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_in_two_seconds(
    start_cli: Start, script: Callable[[str], str], number: int
) -> None:
    launcher = start_cli("run", "-n", 2, script(RANK + "print(rank, flush=True); time.sleep(99)"))
    assert launcher.stdout
    launcher.stdout.readline()
    began = time.monotonic()
    launcher.send_signal(number)
    launcher.wait(ENOUGH)
    assert session_ends(launcher.pid)
    assert time.monotonic() - began < 2


@pytest.mark.stress
def test_argv_and_environment_are_those_of_torchrun(script: Callable[[str], str]) -> None:
    words = [script(DUMP), "--lr", "0.1"]
    run = [sys.executable, "-m", "playground", "run", "-n", "1", *words]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "1", *words]
    ours, theirs = (
        json.loads(subprocess.run(each, capture_output=True, text=True, check=True).stdout)
        for each in (run, torchrun)
    )
    assert {
        name for name in {*ours[0], *theirs[0]} if ours[0].get(name) != theirs[0].get(name)
    } <= (OURS)
    (*here, our_path), (*there, their_path) = (
        [*each[1][:2], *each[1][3:], len(each[1][2])] for each in (ours, theirs)
    )
    assert (here, our_path) == (there, their_path)


NAMED = ("absent-rank", "other-order", "unused-parameters")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in NAMED else pytest.mark.stress)
        for name, expected in PROGRAMS.items()
        if expected.symptom in (DEADLOCK, TIMEOUT, FAILURE)
    ],
)
def test_a_program_of_break_is_named_as_break_names_it(
    run_cli: Run, script: Callable[[str], str], name: str
) -> None:
    function, expected = find(name), PROGRAMS[name]
    text = file_of(function.module).read_text()
    text += "\ndist.init_process_group('gloo')\n"
    text += f"print({function.name}(dist.get_rank(), dist.get_world_size()))\n"
    limit = ["--timeout", STALL] if expected.symptom == TIMEOUT else []
    shown = run_cli("run", "-n", 3, *limit, script(text))
    assert shown.code == 1
    told = " ".join(shown.err.split())
    if expected.symptom == FAILURE:
        assert expected.words in told
    else:
        assert expected.words.cure in told  # type: ignore[attr-defined]


def test_the_torchrun_line_does_the_same() -> None:
    program = Program(name="a.b", is_module=True, arguments=("--lr", "x y"))
    assert to_torchrun(4, 3, program) == (
        "torchrun --nproc-per-node 4 --max-restarts 3 -m a.b --lr 'x y'"
    )
