"""breakpoint() in a rank."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import textwrap
from pathlib import Path

import pytest

from playground import RankFailed, launch


def stop_here(rank: int, size: int) -> str:
    answer = "unchanged"
    breakpoint()
    return answer


SCRIPT = textwrap.dedent("""
    from playground import launch
    from test_rank import stop_here

    if __name__ == "__main__":
        print("answers:", *sorted(launch(stop_here, 2)))
    """)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "script.py")]


def test_at_a_terminal_one_rank_after_the_other_can_be_debugged(script: list[str]) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(script[0], script)
    shown = ""
    for answer in ("first", "second"):
        shown = read_until(terminal, shown, " Pdb) ")
        os.write(terminal, f"answer = {answer!r}\n".encode())
        shown = read_until(terminal, shown, " Pdb) ")
        os.write(terminal, b"c\n")
    shown = read_until(terminal, shown, "answers: first second")
    assert {"(rank 0 Pdb)", "(rank 1 Pdb)"} == {
        f"(rank {rank} Pdb)" for rank in (0, 1) if f"(rank {rank} Pdb)" in shown
    }
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def read_until(terminal: int, shown: str, end: str) -> str:
    """All that the terminal has shown, from `shown` on up to the next `end`."""
    seen = len(shown)
    while end not in shown[seen:]:
        with contextlib.suppress(OSError):  # the other side has closed it
            if piece := os.read(terminal, 4096).decode():
                shown += piece
                continue
        raise AssertionError(f"{end!r} never came: {shown}")
    return shown


def stop_without_terminal(rank: int, size: int) -> None:
    os.setsid()
    breakpoint()


def test_without_a_terminal_it_says_what_would_do() -> None:
    with pytest.raises(RankFailed, match=r"breakpoint\(\) in a rank needs a terminal"):
        launch(stop_without_terminal, 2)


def test_a_breakpoint_can_be_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert launch(stop_here, 2) == ["unchanged"] * 2
