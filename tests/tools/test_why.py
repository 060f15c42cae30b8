"""why: a run that stands still is asked, and a process that is none of ours refused."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import Fork
from processes import ENOUGH
from programs import SCRIPT

from playground.explain.hang import Doing
from playground.explain.hang.box import find_boxes
from playground.tools.why.page import list_family

STANDS_STILL = """
import os, time, torch, torch.distributed as dist
from playground import launch

def run(rank, size):
    dist.barrier()
    if rank == 0:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    launch(run, 3, timeout=300)
"""


def wait_for_ranks_in(operation: str, pid: int, count: int) -> None:
    deadline = time.monotonic() + ENOUGH
    while time.monotonic() < deadline:
        states = [box.read() for box in find_boxes(list_family(pid)) if box.world]
        waits = (state.waits_for for state in states if state.doing == Doing.IN_OPERATION)
        if sum(wait is not None and wait.name == operation for wait in waits) == count:
            return
        time.sleep(0.02)
    raise AssertionError("the ranks never came to the operation")


def test_a_run_is_asked_why_it_stands_still(
    run_cli: Callable[..., Any], fork_program: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{SCRIPT}.py").write_text(STANDS_STILL)
    monkeypatch.syspath_prepend(tmp_path)
    program = fork_program(SCRIPT)
    wait_for_ranks_in("all_reduce", program.pid, 2)
    told = run_cli("why", program.pid).out
    assert told.startswith(
        f"rank 0 is in the program while ranks 1-2 are in all_reduce ({SCRIPT}.py:9)\n"
    )
    named = re.fullmatch(r"where rank 0 is: py-spy dump --pid (\d+)", told.splitlines()[-1])
    assert named
    [box] = [box for box in find_boxes(list_family(program.pid)) if box.pid == int(named[1])]
    assert box.read().rank == 0


AGENT = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(
        [sys.executable, "-u", "train.py", "--lr", "0.1"],
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
    )
    for rank in range(2)
]
print(*(rank.pid for rank in ranks if rank.stdout.readline()), flush=True)
sys.stdin.read()
for rank in ranks:
    rank.kill()
"""
TRAIN = """
import os, time
print("up", flush=True)
while True:
    if os.environ["RANK"] == "0":
        time.sleep(300)
"""


def test_of_a_plain_script_under_torchrun_it_says_what_is_seen_and_what_tells_more(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processes, arguments and variables of torchrun's. A rank that computes is told from
    one that waits."""
    (tmp_path / "train.py").write_text(TRAIN)
    words = [sys.executable, "-c", AGENT]
    with subprocess.Popen(
        words, cwd=tmp_path, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout
        first, second = agent.stdout.readline().split()
        elsewhere = run_cli("why", agent.pid)
        monkeypatch.chdir(tmp_path)
        there = run_cli("why", first)
        agent.communicate()
    assert (elsewhere.code, elsewhere.err.count("\n")) == (2, 1)
    assert f"Rank 0 (process {first}) waits, rank 1 (process {second}) computes;" in elsewhere.err
    run = "python -m playground run -n 2 train.py --lr 0.1"
    assert f"cd {tmp_path} && {run};" in elsewhere.err
    assert f"start it by: {run};" in there.err
    assert "python -m playground doctor train.py --lr 0.1;" in there.err
    assert there.err.endswith(f"py-spy dump --pid {first}\n")


def test_a_process_that_is_none_of_ours_is_refused_in_a_line(run_cli: Callable[..., Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        result = run_cli("why", process.pid)
        process.kill()
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "has started no ranks" in result.err
