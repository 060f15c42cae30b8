"""`run --output rounds`: the k-th lines of all ranks together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import Fork, Run, Save
from processes import ENOUGH
from programs import SCRIPT, ForkedProgram

from playground.world.launcher import rounds

HEAD = """
import os, pathlib, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def await_file(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

"""
IN_TURN = """
for step in range(3):
    for turn in range(size):
        if turn == size - 1 - rank:
            print(f"step {step} of rank {rank}", flush=True)
            pathlib.Path(f"{step} {turn}").touch()
        await_file(f"{step} {turn}")
"""
HELD_FOR_EVER = """
import sys
from playground.app import run
from playground.world.launcher import rounds
rounds.HOLD = 1e6
sys.argv = ["playground", "run", "--output", "rounds", "-n", "2", "train.py"]
if __name__ == "__main__":
    run()
"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait for ever."""
    monkeypatch.setattr(rounds, "HOLD", 1e6)


@pytest.mark.usefixtures("held")
def test_lines_appear_in_rounds_whoever_prints_first(save: Save, run_cli: Run) -> None:
    ran = run_cli("run", "--output", "rounds", "-n", 3, save(HEAD + IN_TURN))
    expected = [f"step {step} of rank {rank}" for step in range(3) for rank in range(3)]
    assert (ran.out.splitlines(), ran.code) == (expected, 0)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("print('a', rank); rank and print('b 1\\nc 1')", "a 0\na 1\nb 1\nc 1\n"),
        ("rank or print('a 0'); rank and print('a 1\\nb 1', end='')", "a 0\na 1\nb 1"),
        ("print(rank, 'é\\n\\nü')", "0 é\n1 é\n\n\nü\nü\n"),
        ("pass", ""),
    ],
)
def test_lines_of_a_rank_that_prints_more_follow(
    save: Save, run_cli: Run, text: str, out: str
) -> None:
    ran = run_cli("run", "--output", "rounds", save(HEAD + text))
    assert (ran.code, ran.out) == (0, out)


@pytest.mark.usefixtures("held")
def test_lines_that_wait_appear_when_a_rank_fails(save: Save, run_cli: Run) -> None:
    text = """
if rank == 0:
    print("before")
    pathlib.Path("printed").touch()
    time.sleep(1000)
await_file("printed")
raise ValueError("wrong")
"""
    ran = run_cli("run", "--output", "rounds", save(HEAD + text))
    assert (ran.code, ran.out) == (1, "before\n")
    assert ran.err.startswith("playground: rank 1 of 2 failed: ValueError: wrong\n")


def lines_until(program: ForkedProgram, file: str) -> Iterator[str]:
    """The first line that a program prints; then its end, when there is this file."""
    yield program.stdout.readline()
    Path(file).touch()
    yield program.stdout.read()


def test_a_line_is_passed_on_though_another_rank_prints_nothing(
    save: Save, fork_program: Fork
) -> None:
    save(HEAD + "rank and print('alone')\nawait_file('seen')\nrank or print('late')")
    program = fork_program("playground", "run", "--output", "rounds", "-n", 2, "train.py")
    assert [*lines_until(program, "seen")] == ["alone\n", "late\n"]
    assert program.wait(ENOUGH) == 0


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("rank and print('alone')\nif rank: await_file('seen')", ["alone\n", ""]),
        (
            "rank and print('25 %\\r50 %', end='', flush=True)\nawait_file('seen')",
            ["25 %\n", "50 %"],
        ),
    ],
    ids=["rank 0 has ended", "it overwrites itself"],
)
def test_a_line_that_need_not_wait_does_not(
    save: Save, fork_program: Fork, text: str, out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(HEAD + text)
    save(HELD_FOR_EVER, f"{SCRIPT}.py")
    monkeypatch.syspath_prepend(os.getcwd())
    program = fork_program(SCRIPT)
    assert [*lines_until(program, "seen")] == out
    assert program.wait(ENOUGH) == 0


@pytest.mark.usefixtures("held")
def test_stderr_does_not_wait(save: Save, run_cli: Run) -> None:
    text = "print(rank, file=sys.stderr)\nrank and print('x', file=sys.stderr)"
    ran = run_cli("run", "--output", "rounds", save(HEAD + text))
    printed, _, apart = ran.err.partition("playground: ")
    assert (ran.code, ran.out, sorted(printed.split())) == (0, "", ["0", "1", "x"])
    assert apart.startswith("no rank has formed a process group: ")
