"""Ranks of a real kernel: a person answers them, and they end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from processes import ENOUGH, session_ends, session_members


class Notebook:
    """A kernel, and what a person does at its front end."""

    manager: KernelManager
    client: BlockingKernelClient

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(startup_timeout=ENOUGH, kernel_name="python3")
        self.answers: list[str] = []
        self.prompts: list[str] = []

    @property
    def process(self) -> int:
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)

    def answer(self, message: dict[str, Any]) -> None:
        """Type an answer; without one that is left, press the button that interrupts."""
        self.prompts.append(message["content"]["prompt"])
        if self.answers:
            self.client.input(self.answers.pop(0))
        else:
            self.manager.interrupt_kernel()

    def run(self, cell: str, *answers: str) -> str:
        """The text below a cell, when it has run."""
        self.answers = [*answers]
        shown: list[str] = []

        def show(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                shown.append(message["content"]["text"])

        self.client.execute_interactive(
            cell, timeout=ENOUGH, allow_stdin=True, stdin_hook=self.answer, output_hook=show
        )
        return "".join(shown)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = Notebook()
    process = notebook.process
    try:
        assert "2 ranks on gloo" in notebook.run("%load_ext playground\n%ranks 2")
        assert len(session_members(process)) >= 4
        yield notebook
    finally:
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel(now=True)
    assert session_ends(process)


def test_ranks_ask_in_a_notebook_and_end_with_its_kernel(notebook: Notebook) -> None:
    shown = notebook.run("name = input('name? ')\nname", "a", "b")
    assert sorted(notebook.prompts) == ["[0] name? ", "[1] name? "]
    assert sorted(line[-3:] for line in shown.splitlines()) == ["'a'", "'b'"]
    shown = notebook.run("if rank == 1: breakpoint()\nkept = 5", "p rank + 40", "c")
    assert "[1] 41\n" in shown
    shown = notebook.run("if rank == 1: input()\ndist.barrier()")
    assert "interrupted after" in shown
    assert "[0]   barrier (cell 4, line 2)\n[1]   cell 4, line 1" in shown
    assert notebook.run("dist.barrier(); kept") == "[0-1] 5\n"
    session = notebook.process
    notebook.client.execute("dist.barrier() if rank else [1 for _ in iter(int, 1)]")
    os.kill(session, signal.SIGKILL)
    assert session_ends(session)


@pytest.mark.stress
@pytest.mark.parametrize("now", [False, True])
def test_no_rank_outlives_a_restart(notebook: Notebook, now: bool) -> None:
    session = notebook.process
    notebook.client.execute("dist.barrier() if rank else [1 for _ in iter(int, 1)]")
    notebook.manager.restart_kernel(now=now)
    assert session_ends(session)
