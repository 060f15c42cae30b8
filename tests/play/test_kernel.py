"""Ranks of a real kernel: a person answers them, and they end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager
from notebooks import Notebook, place_to_meet
from processes import ENOUGH, session_ends, session_members


class KernelOfItsOwn(Notebook):
    """A kernel as Jupyter starts it, in a process of its own."""

    manager: KernelManager

    def __init__(self, place: dict[str, Any]) -> None:
        self.manager = KernelManager(kernel_name="python3", **place)
        self.manager.start_kernel()
        client = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=ENOUGH)
        super().__init__(client, self.manager.interrupt_kernel)

    @property
    def process(self) -> int:
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelOfItsOwn]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with place_to_meet() as place:
        notebook = KernelOfItsOwn(place)
        process = notebook.process
        try:
            assert "2 ranks on gloo" in notebook.run("%load_ext playground\n%ranks 2")
            assert len(session_members(process)) >= 4
            yield notebook
        finally:
            notebook.client.stop_channels()
            notebook.manager.shutdown_kernel(now=True)
        assert session_ends(process)


def test_ranks_ask_in_a_notebook_and_end_with_its_kernel(notebook: KernelOfItsOwn) -> None:
    hang = " ".join(notebook.run("dist.barrier() if rank else None").split())
    assert "rank 0 has finished the cell where rank 1 is in barrier (cell 2, line 1)" in hang
    [result] = notebook.execute("%%here\npush(y=5); pull('y + rank')")
    assert result.data["text/plain"] == "[5, 6]"
    shown = notebook.run("name = input('name? ')\nname", "a", "b")
    assert sorted(notebook.prompts) == ["[0] name? ", "[1] name? "]
    assert sorted(line[-3:] for line in shown.splitlines()) == ["'a'", "'b'"]
    shown = notebook.run("if rank == 1: breakpoint()\nkept = 5", "p rank + 40", "c")
    assert "[1] 41\n" in shown
    shown = notebook.run("if rank == 1: input()\ndist.barrier()")
    assert "interrupted after" in shown
    assert "[0]   barrier (cell 6, line 2)\n[1]   cell 6, line 1" in shown
    assert notebook.run("dist.barrier(); kept") == "[0-1] 5\n"
    assert "swap" in notebook.run("%%exercise swap\ndef sign(value): return -1 if value < 0 else 1")
    assert notebook.run("sign(-2.0)") == "[0-1] -1\n"  # what was judged is there on all ranks
    session = notebook.process
    notebook.client.execute("dist.barrier() if rank else [1 for _ in iter(int, 1)]")
    os.kill(session, signal.SIGKILL)
    assert session_ends(session)


@pytest.mark.stress
@pytest.mark.parametrize("now", [False, True])
def test_no_rank_outlives_a_restart(notebook: KernelOfItsOwn, now: bool) -> None:
    session = notebook.process
    notebook.client.execute("dist.barrier() if rank else [1 for _ in iter(int, 1)]")
    notebook.manager.restart_kernel(now=now)
    assert session_ends(session)
