"""The table of `make gpu`: its rows are commands that exist, and each is printed. No GPU is
needed."""

from __future__ import annotations

import re
from pathlib import Path

import click
import on_gpu
import pytest
from on_gpu import ROWS, Machine, Row, carry_out_all, last_line

from playground.app import COMMANDS, cli
from playground.exercises import EXERCISES
from playground.world.simulated_gpu.environment import GPUS

MACHINES = {
    "one GPU": Machine(gpus=1, ranks=1, shares=False),
    "one GPU, shared": Machine(gpus=1, ranks=2, shares=True),
    "eight GPUs": Machine(gpus=8, ranks=8, shares=True),
}
MACHINE = MACHINES["one GPU"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_row_is_a_command_that_exists(machine: Machine, tmp_path: Path) -> None:
    """With options that it has. (What it refuses later, a GPU that is not there above all, is not
    asked.)"""
    commands = [row.command(machine, tmp_path) for row in ROWS if row.needs(machine)]
    assert len(commands) > 25
    for words in commands:
        if "playground" in words:
            parse(words[words.index("playground") + 1 :])
    assert commands[-1][1:3] == ["-m", "pytest"]


def parse(words: list[str]) -> None:
    """Raise `click.UsageError` for a command line that cannot be."""
    name, *rest = words
    command = cli.get_command(click.Context(cli), name)
    assert command, name
    if inner := command.make_context(name, rest).params.get("words"):
        parse([*inner])


def test_the_table_leaves_no_lesson_out() -> None:
    tabled = {row.words.split()[0] for row in ROWS}
    assert {*COMMANDS} - tabled == {
        "scale",
        "break",
        "run",
        "why",
        "site",
        "read",
        "play",
        *EXERCISES,
    }, "which know no backend but gloo, or leave it to the script, or to who types"
    hangs_first = [row.words.split()[0] for row in ROWS[:2]]
    assert hangs_first == ["pipeline", "pipeline"]


def test_rows_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is fine, one that fails, one that hangs; on a simulated GPU without a figure."""
    programs = {
        "say": "import sys; print('first'); print(*sys.argv[1:])",
        "fail": "import sys; print('no luck', file=sys.stderr); sys.exit(3)",
        "hang": "import time; print('so far', flush=True); time.sleep(1000)",
    }
    for name, words in programs.items():
        monkeypatch.setitem(on_gpu.PROGRAMS, name, ("-c", words))
    rows = [
        Row("say {on}", verdict=lambda out: f"said | {last_line(out)}"), Row("fail",
        environ={"WHY": "1"}),
        Row("hang", limit=0.05),
    ]  # fmt: skip
    monkeypatch.setenv(GPUS, "1")
    assert not carry_out_all(rows, MACHINE)
    monkeypatch.delenv(GPUS)
    assert carry_out_all([rows[0], Row("fail", code=3)], MACHINE)
    out, _ = capsys.readouterr()
    simulated, real = (
        [*map(cells_of, table.splitlines()[2:])] for table in re.split(r"(?<=\n)(?=\| lesson)", out)
    )
    assert simulated[0] == ["`say`", "1", "-", "0", "as it should be"]
    assert simulated[1:] == [
        ["`WHY=1 fail`", "1", "-", "3", "no luck"],
        ["`hang`", "1", "-", "none", "not done after 0.25 s"],
    ]
    assert float(real[0][2]) >= 0  # seconds, where it has a GPU
    assert real[0][3:] == ["0", "said / --backend nccl -n 1"]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
