"""The prompt, in a terminal and in a notebook: a whole session as it is typed, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from processes import ENOUGH, session_ends, session_members
from programs import Outcome

from playground.runtime.remote import ROOT

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])")
README = ROOT / "playground" / "play" / "README.md"
SESSION = re.compile(r"```console\n\$ python -m playground play -n 4\n(.*?)```", re.DOTALL)
IN = re.compile(r"^\[0-3\] In \[\d+\]: ", re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+|\b\d+$|(?<=  )\d+(?= ms)", re.MULTILINE)
SOON = 2.0
"""Seconds in which all ranks have ended."""


class Prompt:
    """A session in a terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        environ = {**os.environ, "TERM": "xterm", "IPYTHONDIR": str(folder), "NO_COLOR": "1"}
        environ["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody answers where the cursor is
        self.terminal = pexpect.spawn(
            sys.executable, ["-m", "playground", "play", *words], env=environ, encoding="utf-8",
            timeout=ENOUGH, dimensions=(40, 160),
        )  # fmt: skip
        self.number = 0
        self.head = self.await_prompt()

    def await_prompt(self) -> str:
        """What has been shown when the next prompt comes."""
        self.number += 1
        self.terminal.expect(rf"In \[(\x1b\S*?m)*{self.number}(\x1b\S*?m)*\]: ")
        return SEQUENCE.sub("", self.terminal.before).replace("\r", "")

    def type(self, cell: str, interrupt: bool = False) -> str:
        """Type a cell. With `interrupt` all ranks print "here" in it, and Ctrl-C comes when all
        have done so. What has been shown when the next prompt comes."""
        self.terminal.send(cell)
        self.terminal.expect_exact(cell[-1])
        time.sleep(0.2)
        self.terminal.send("\r")
        if interrupt:
            for _ in range(3):
                self.terminal.expect(r"\] here")
            time.sleep(0.5)
            self.terminal.sendintr()
        return self.await_prompt()


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Prompt]:
    prompt = Prompt(tmp_path, "-n", "3")
    yield prompt
    prompt.terminal.close(force=True)
    assert session_ends(prompt.terminal.pid)


def test_a_session(prompt: Prompt) -> None:
    assert "3 ranks on gloo, each with rank, size, torch, dist." in prompt.head
    shown = prompt.type("x = torch.tensor([10.0 ** rank]); dist.all_reduce(x); x")
    assert "[0-2] tensor([111.])" in shown
    shown = prompt.type("if rank != 2: dist.barrier()")
    shown = " ".join(shown.split())
    assert "rank 2 has finished the cell where ranks 0-1 are in barrier (cell 2, line 1)" in shown
    assert "The ranks are free again; their variables are as they were" in shown
    assert "[0-2] tensor([111.])" in prompt.type("x")
    assert "[0-2] cell 4, line 1" in prompt.type(
        "import time; print('here'); time.sleep(60)", interrupt=True
    )
    cell = "print('here'); time.sleep(60) if rank == 0 else dist.barrier()"
    shown = prompt.type(cell, interrupt=True)
    assert "[1-2] barrier (cell 5, line 1)" in shown
    assert "barrier  cell 5, line 1" in prompt.type("%calls")
    prompt.type("dist.all_reduce(x)")
    assert "all_reduce  cell 7, line 1" in prompt.type("%calls")
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
    prompt.terminal.sendintr()
    assert f"[1]   cell {prompt.number}, line 1" in prompt.await_prompt()
    shown = prompt.type("%time size")
    assert "[0-2] 3" in shown
    assert "Wall time" in shown
    assert "Tensor: tensor" in prompt.type("x?")
    assert "device" in prompt.type("%world")
    assert "NameError" in prompt.type("no_such_name")
    assert "name ranks, as in 0,2" in prompt.type("%on x")
    assert "2 ranks on gloo" in prompt.type("%ranks 2")
    assert "[0-1] 2" in prompt.type("size")
    prompt.terminal.sendeof()
    prompt.terminal.expect(pexpect.EOF)
    prompt.terminal.wait()
    assert prompt.terminal.exitstatus == 0


def end_by_ctrl_d(prompt: Prompt) -> None:
    prompt.terminal.sendeof()


def close_the_terminal(prompt: Prompt) -> None:
    os.close(prompt.terminal.fileno())


def kill(prompt: Prompt) -> None:
    os.kill(prompt.terminal.pid, signal.SIGKILL)


def terminate_in_a_cell(prompt: Prompt) -> None:
    prompt.terminal.send("dist.barrier() if rank else [1 for _ in iter(int, 1)]\r")
    time.sleep(2)
    os.kill(prompt.terminal.pid, signal.SIGTERM)


@pytest.mark.parametrize(
    "end",
    [
        close_the_terminal,
        terminate_in_a_cell,
        *(pytest.param(end, marks=pytest.mark.stress) for end in (end_by_ctrl_d, kill)),
    ],
)
def test_no_rank_is_left(tmp_path: Path, end: Callable[[Prompt], None]) -> None:
    """`test_a_session` ends by Ctrl-D, too."""
    prompt = Prompt(tmp_path, "-n", "2")
    assert "[0]   0" in prompt.type("rank")
    assert len(session_members(prompt.terminal.pid)) >= 4
    end(prompt)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline and session_members(prompt.terminal.pid):
        time.sleep(0.05)
    assert session_members(prompt.terminal.pid) == []


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    sources = (
        "%load_ext playground\n%ranks 2",
        "x = torch.full((2,), float(rank)); dist.all_reduce(x); x",
        "dist.barrier() if rank else None",
        "%%here\npush(y=5); pull('x + y')",
        "y",
    )
    make: Any = nbformat.v4
    notebook = make.new_notebook(cells=[make.new_code_cell(each) for each in sources])
    NotebookClient(
        notebook, timeout=ENOUGH, kernel_name="python3", shutdown_kernel="immediate"
    ).execute()
    shown = [
        "".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert "2 ranks on gloo" in shown[0]
    assert shown[1] == "[0-1] tensor([1., 1.])"
    hang = " ".join(shown[2].split())
    assert "rank 0 has finished the cell where rank 1 is in barrier (cell 3, line 1)" in hang
    assert shown[3] == "[tensor([6., 6.]), tensor([6., 6.])]"
    assert shown[4] == "[0-1] 5\n"


def without_times(text: str) -> str:
    """In one line, with the same number in the place of each that differs from run to run."""
    return " ".join(NUMBER.sub("N", text.replace(" s,", " ms,")).split())


def test_the_session_of_the_readme_is_what_happens(tmp_path: Path) -> None:
    head, *cells = IN.split(SESSION.findall(README.read_text())[0])
    prompt = Prompt(tmp_path, "-n", "4")
    with contextlib.closing(prompt.terminal):
        assert head.strip() in prompt.head
        for each in cells:
            cell, _, output = each.partition("\n")
            shown = without_times(prompt.type(cell))
            for part in output.split("…"):
                assert without_times(part) in shown
    assert session_ends(prompt.terminal.pid)
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
    assert outcome.code == 2
    assert "starts a world of its own" in outcome.err
