"""Breakpoints in `run`, `launch` and `check`: a person answers one rank at a time, at a terminal,
and nothing ends the others' waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest
import torch.distributed as dist
from fixtures import Ran, Save
from processes import ENOUGH

from playground import RankFailed, UsageError, launch
from playground.world.launcher.launch import ADVICE_TO_CALLER, LaunchConfig
from playground.world.rank.assignment import Breakpoints

PROMPT = r"\[rank (\d)\] \(Pdb\) "
SCRIPT = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
rank = dist.get_rank()
x = torch.ones(1) * rank
breakpoint()
dist.all_reduce(x)
dist.all_reduce(x, group=dist.new_group())
print("sum", x.item())
"""
ANSWERED = 3.0
"""Seconds that a person takes, who is slower than the timeout of the script's process group."""


@pytest.fixture
def at_terminal() -> Iterator[Callable[..., pexpect.spawn]]:
    """A Python program at a terminal, which does not outlive the test."""
    begun: list[pexpect.spawn] = []

    def begin(*words: str) -> pexpect.spawn:
        environ = {**os.environ, "NO_COLOR": "1"}
        child = pexpect.spawn(
            sys.executable, [*words], encoding="utf-8", timeout=ENOUGH, env=environ,
            dimensions=(40, 200),
        )  # fmt: skip
        begun.append(child)
        return child

    yield begin
    for child in begun:
        child.close(force=True)


def ask(child: pexpect.spawn, expression: str) -> str:
    """What the rank that is at its prompt says to an expression."""
    child.sendline(f"p {expression}")
    child.expect_exact(f"p {expression}\r\n")
    child.expect(r"\[rank \d\] ([^>\r\n]+)\r\n")
    return str(child.match[1])


def read_rest(child: pexpect.spawn) -> str:
    child.expect(pexpect.EOF)
    child.close()
    return str(child.before).replace("\r\n", "\n")


def test_one_rank_is_debugged_while_the_others_wait(
    save: Save, at_terminal: Callable[..., pexpect.spawn]
) -> None:
    save(SCRIPT)
    child = at_terminal("-m", "playground", "run", "-n", "3", "--debug", "1", "train.py")
    child.expect(PROMPT)
    assert child.match[1] == "1"
    assert "-> dist.all_reduce(x)" in child.before
    time.sleep(ANSWERED)
    assert ask(child, "rank + 10") == "11"
    child.expect(PROMPT)
    child.sendline("w")
    child.expect(PROMPT)
    assert re.findall(r"([\w.]+)\(\d+\)", child.before) == ["train.py"]
    child.sendline("n")
    child.expect(PROMPT)
    assert "-> dist.all_reduce(x, group=dist.new_group())" in child.before
    child.sendline("c")
    rest = read_rest(child)
    said = [line for line in rest.splitlines() if " sum " in line]
    assert sorted(said) == [f"[rank {rank}] sum 9.0" for rank in range(3)]
    assert child.exitstatus == 0


def test_ranks_are_asked_one_after_the_other(
    save: Save, at_terminal: Callable[..., pexpect.spawn]
) -> None:
    save(SCRIPT.replace("seconds=2", f"seconds={ENOUGH}"))
    child = at_terminal("-m", "playground", "run", "-n", "3", "train.py")
    asked = []
    for place in range(3):
        child.expect(PROMPT)
        rank = int(child.match[1])
        asked.append(rank)
        # the rank that has come first is named, and ranks that come together are asked in order
        advice = r"playground: rank \d is at a breakpoint \(train\.py:7\); ranks are asked"
        assert child.before.count("is at a breakpoint") == (place == 0)
        assert place or re.search(advice, child.before)
        child.sendline("c")
    assert sorted(asked) == [0, 1, 2]
    assert read_rest(child).count("sum 9.0") == 3


def test_who_quits_the_debugger_ends_the_run(
    save: Save, at_terminal: Callable[..., pexpect.spawn]
) -> None:
    save(SCRIPT)
    child = at_terminal("-m", "playground", "run", "-n", "2", "--debug", "0", "train.py")
    child.expect(PROMPT)
    child.sendline("q")
    assert read_rest(child) == "q\nplayground: rank 0 of 2 was ended in its debugger\n"
    assert child.exitstatus == 1


def test_without_a_person_a_breakpoint_is_told_in_one_line(save: Save, run_it: Ran) -> None:
    save(SCRIPT)
    ran = run_it("-n", 3, "train.py")
    assert (ran.code, ran.out) == (2, "")
    rank = ran.err.split()[2]
    assert ran.err == (
        f"playground: rank {rank} is at a breakpoint (train.py:7): with --debug {rank} it opens "
        "here, while the other ranks wait\n"
    )


def test_answers_may_come_from_a_pipe(save: Save) -> None:
    save(SCRIPT)
    words = [sys.executable, "-m", "playground", "run", "-n", "2", "--debug", "1", "train.py"]
    ran = subprocess.run(
        words, input="p rank + 20\nc\n", capture_output=True, text=True, timeout=ENOUGH, check=True
    )
    assert "21\n" in ran.stdout
    assert ran.stdout.count("sum 2.0") == 2


def test_a_rank_that_is_not_there_is_not_debugged(save: Save, run_it: Ran) -> None:
    save(SCRIPT)
    ran = run_it("--debug", 2, "train.py")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "playground: debug rank 2: the ranks of this world are 0 to 1\n"


@pytest.mark.parametrize(("word", "script"), [("train.py", " train.py"), ("all", "")])
def test_a_debugger_needs_the_number_of_a_rank(
    save: Save, run_it: Ran, word: str, script: str
) -> None:
    save(SCRIPT)
    ran = run_it("--debug", word, "train.py")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"playground: --debug needs a rank, as in --debug 0{script}\n"


LAUNCHED = """
import pdb, torch, torch.distributed as dist
from playground import launch
def work(rank, size):
    x = torch.ones(1) * rank
    if rank != 1:
        pdb.set_trace()
    dist.all_reduce(x)
    return x.item()
if __name__ == "__main__":
    print(launch(work, 3))
"""


def test_ranks_of_launch_ask_at_its_terminal(
    save: Save, at_terminal: Callable[..., pexpect.spawn]
) -> None:
    save(LAUNCHED)
    child = at_terminal("train.py")
    asked = []
    for _ in range(2):
        child.expect(PROMPT)
        rank = int(child.match[1])
        asked.append(rank)
        assert ask(child, "rank + 30") == str(rank + 30)
        child.expect(PROMPT)
        child.sendline("c")
    assert sorted(asked) == [0, 2]
    assert "[3.0, 3.0, 3.0]" in read_rest(child)


def stop_and_sum(rank: int, size: int) -> tuple[float, timedelta]:
    breakpoint()
    dist.barrier()
    return rank, dist.distributed_c10d.default_pg_timeout


def test_launch_asks_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "c"

    monkeypatch.setattr("builtins.input", answer)
    results = launch(stop_and_sum, 2, debug=[1])
    assert [rank for rank, _ in results] == [0, 1]
    assert all(limit > timedelta(days=1) for _, limit in results)
    assert prompts == ["[rank 1] (Pdb) "]
    monkeypatch.setattr("builtins.input", lambda prompt: "q")
    with pytest.raises(RankFailed, match="rank 0 of 2 was ended in its debugger"):
        launch(stop_and_sum, 2, debug=[0])
    with pytest.raises(UsageError, match=r"is at a breakpoint \(test_breakpoints.py:\d+\): it"):
        launch(stop_and_sum, 2)
    with pytest.raises(UsageError, match="debug rank 2: the ranks of this world are 0 to 1"):
        launch(stop_and_sum, 2, debug=[0, 2])


def test_at_a_terminal_breakpoints_open_unless_no_rank_is_to_be_debugged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert LaunchConfig().choose_breakpoints(2) == Breakpoints(ranks=(0, 1))
    assert LaunchConfig(debug=[]).choose_breakpoints(2) == Breakpoints(advice=ADVICE_TO_CALLER)


SWAP = """
import torch
import torch.distributed as dist


def swap(rank: int, size: int, tensor: torch.Tensor) -> torch.Tensor:
    theirs = tensor.clone()
    if rank ^ 1 < size:
        breakpoint()
        work = dist.isend(tensor, rank ^ 1)
        dist.recv(theirs, rank ^ 1)
        work.wait()
        print("swapped", rank)
    return theirs
"""


def test_a_solution_is_debugged(
    save: Save, at_terminal: Callable[..., pexpect.spawn], start_cli: Any
) -> None:
    save(SWAP, "swap.py")
    child = at_terminal("-m", "playground", "check", "swap", "-n", "2", "--debug")
    asked, shown = set(), ""
    while child.expect([PROMPT, pexpect.EOF]) == 0:
        asked.add(int(child.match[1]))
        shown += child.before
        child.sendline("c")
    child.close()
    assert asked == {0, 1}
    for line in (
        "[rank 1] case 1 on 2 ranks: 6 elements, int64",
        "[rank 1]   tensor = tensor([10, 10, 10, 10, 10, 10])",
        "[rank 0] case 3 on 2 ranks: 1 element, float64",
    ):
        assert shown.count(line) == 1
    assert "[rank 1] swapped 1" in child.before
    assert "swap.py  passed on 2 ranks" in child.before
    assert child.exitstatus == 0
    out, _ = start_cli("check", "swap.py").communicate(timeout=ENOUGH)
    assert "Debug: python -m playground check swap.py -n 2 --debug" in out
