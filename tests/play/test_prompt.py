"""The prompt in a terminal: a whole session as it is typed, and how it ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from pexpect.fdpexpect import fdspawn
from processes import ENOUGH, session_ends, session_members
from programs import Outcome, fork_in_terminal

from playground.base.remote import ROOT

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])")
README = ROOT / "playground" / "play" / "README.md"
SESSION = re.compile(r"```console\n\$ python -m playground play -n 4\n(.*?)```", re.DOTALL)
IN = re.compile(r"^\[0-3\] In \[\d+\]: ", re.MULTILINE)
NUMBER = re.compile(r"\d+e[-+]\d+|\d+\.\d+|\b\d+$|(?<=  )\d+(?= ms)", re.MULTILINE)
CTRL_C, CTRL_D = "\x03", "\x04"
"""Seconds in which all ranks have ended."""


class Prompt:
    """A session in a terminal. `is_new`: of a process that has just been started, and not of one
    that has torch imported already."""

    def __init__(self, folder: Path, *words: str, is_new: bool = False) -> None:
        environ = {**os.environ, "TERM": "xterm", "IPYTHONDIR": str(folder), "NO_COLOR": "1"}
        environ["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody answers where the cursor is
        ours, self.process = fork_in_terminal(
            "playground", ["play", *words], environ, 40, 160, is_new
        )
        self.terminal = fdspawn(ours, encoding="utf-8", timeout=ENOUGH)
        self.number = 0
        self.head = ""
        """What has been shown before the first prompt."""

    def await_prompt(self) -> str:
        """What has been shown when the next prompt comes."""
        self.number += 1
        self.terminal.expect(rf"In \[(\x1b\S*?m)*{self.number}(\x1b\S*?m)*\]: ")
        return SEQUENCE.sub("", self.terminal.before).replace("\r", "")

    def type(self, cell: str, interrupt: bool = False) -> str:
        """Type a cell. With `interrupt` each rank prints "here" in it, and Ctrl-C comes when all
        have done so. What has been shown when the next prompt comes."""
        self.terminal.send(f"{cell}\r")
        if interrupt:
            for _ in range(3):
                self.terminal.expect(r"\] here")
            time.sleep(0.5)  # until those that say so before they wait do wait
            self.terminal.send(CTRL_C)
        return self.await_prompt()

    def close(self) -> None:
        """Close the terminal, and kill what has not ended before."""
        self.terminal.close()
        self.process.kill()
        self.process.join()
        self.process.close()
        assert session_ends(self.process.pid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Prompt]]:
    """`start(word, …)`: the first prompt of `play` with these options."""
    started: list[Prompt] = []

    def start(*words: str, is_new: bool = False) -> Prompt:
        started.append(prompt := Prompt(tmp_path, *words, is_new=is_new))
        prompt.head = prompt.await_prompt()
        return prompt

    yield start
    for prompt in started:
        prompt.close()


def test_a_session(start: Callable[..., Prompt]) -> None:
    """From the start of its process to the end of all processes, at SIGTERM."""
    prompt = start("-n", "3", is_new=True)
    assert "3 ranks on gloo, each with rank, size, torch, dist." in prompt.head
    shown = prompt.type("x = torch.tensor([10.0 ** rank]); dist.all_reduce(x); x")
    assert "[0-2] tensor([111.])" in shown
    shown = prompt.type("if rank != 2: dist.barrier()")
    shown = " ".join(shown.split())
    assert "rank 2 has finished the cell where ranks 0-1 are in barrier (cell 2, line 1)" in shown
    assert "ranks 0-1 make a call (cell 2, line 1) that rank 2 does not: is it under" in shown
    assert "The ranks are free again; their variables are as they were" in shown
    assert "[0-2] tensor([111.])" in prompt.type("x")
    shown = prompt.type(
        "import time; print('here'); time.sleep(60) if rank == 0 else dist.barrier()",
        interrupt=True,
    )
    assert "[0]   cell 4, line 1" in shown
    assert "[1-2] barrier (cell 4, line 1)" in shown
    assert "barrier  cell 4, line 1" in prompt.type("%calls")
    prompt.type("dist.all_reduce(x)")
    assert "all_reduce  cell 6, line 1" in prompt.type("%calls")
    prompt.type("%on 0,2")
    assert "[0]   0\n[2]   2\n" in prompt.type("rank")
    assert "[1-2] 3" in prompt.type("%on 1-2") + prompt.type("size")
    prompt.type("%on all")
    prompt.terminal.send("input('name? ') if rank == 1 else None\r")
    prompt.terminal.expect_exact("[1] name? ")
    prompt.terminal.send("a\r")
    assert "[1]   'a'" in prompt.await_prompt()
    prompt.terminal.send("breakpoint() if rank == 1 else None\r")
    prompt.terminal.expect_exact("[1] (Pdb) ")
    prompt.terminal.send(CTRL_C)
    assert f"[1]   cell {prompt.number}, line 1" in prompt.await_prompt()
    shown = prompt.type("%time size")
    assert "[0-2] 3" in shown
    assert "Wall time" in shown
    assert "Tensor: tensor" in prompt.type("x?")
    assert "device" in prompt.type("%world")
    assert "NameError" in prompt.type("no_such_name")
    assert "name ranks, as in 0,2" in prompt.type("%on x")
    prompt.type("kept = 7")
    assert "one host takes 1 to" in prompt.type("%ranks 0")
    assert "[0-2] 7" in prompt.type("kept")
    assert "use %%time" in prompt.type("%timeit size")
    assert "2 ranks on gloo" in prompt.type("%ranks 2")
    assert "[0-1] 2" in prompt.type("size")
    terminate_in_a_cell(prompt)
    assert session_ends(prompt.process.pid, ENOUGH)


def end_by_ctrl_d(prompt: Prompt) -> None:
    prompt.terminal.send(CTRL_D)


def close_the_terminal(prompt: Prompt) -> None:
    prompt.terminal.close()


def kill(prompt: Prompt) -> None:
    prompt.process.kill()


def terminate_in_a_cell(prompt: Prompt) -> None:
    cell = "print('here'); dist.barrier() if rank else [1 for _ in iter(int, 1)]"
    prompt.terminal.send(f"{cell}\r")
    prompt.terminal.expect(r"\] here")
    prompt.process.terminate()


@pytest.mark.parametrize(
    "end",
    [
        close_the_terminal,
        *(
            pytest.param(end, marks=pytest.mark.stress)
            for end in (end_by_ctrl_d, kill, terminate_in_a_cell)
        ),
    ],
)
def test_no_rank_is_left(start: Callable[..., Prompt], end: Callable[[Prompt], None]) -> None:
    """`test_a_session` ends by SIGTERM in a cell, too, and that of the README by Ctrl-D."""
    prompt = start("-n", "2")
    assert "[0]   0" in prompt.type("rank")
    assert len(session_members(prompt.process.pid)) >= 4
    end(prompt)
    assert session_ends(prompt.process.pid, ENOUGH)


def without_times(text: str) -> str:
    """In one line, with the same number in the place of each that differs from run to run."""
    return " ".join(NUMBER.sub("N", text.replace(" s,", " ms,")).split())


@pytest.mark.torch(2, 15)  # torch 2.14 warns in the middle of zero's table, as its chapter says
def test_the_session_of_the_readme_is_what_happens(start: Callable[..., Prompt]) -> None:
    head, *cells = IN.split(SESSION.findall(README.read_text())[0])
    prompt = start("-n", "4")
    assert head.strip() in prompt.head
    for each in cells:
        cell, _, output = each.partition("\n")
        shown = without_times(prompt.type(cell))
        for part in output.split("…"):
            assert without_times(part) in shown
    end_by_ctrl_d(prompt)
    prompt.terminal.expect(pexpect.EOF)
    assert prompt.process.join(ENOUGH) == 0
    assert session_ends(prompt.process.pid, ENOUGH)
    short = SESSION.findall((ROOT / "README.md").read_text())[0]
    whole = without_times(README.read_text().replace("cell 3", "cell 2"))
    parts = [part for each in IN.split(short) for part in each.partition("\n")[2].split("…")]
    assert all(without_times(part) in whole for part in parts)
    assert len(parts) == 4


def test_a_world_that_cannot_be(
    run_cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    outcome = run_cli("play")
    assert outcome.code == 2, outcome.err
    assert "starts a world of its own" in outcome.err
