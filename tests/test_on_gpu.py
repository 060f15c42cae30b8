"""The table of `make gpu`: its rows are commands that exist, and it is kept whatever happens. No GPU is needed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click
import on_gpu
import pytest
from on_gpu import ROWS, SIMULATED, Log, Machine, Row, carry_out_all, last_line
from processes import ENOUGH

from playground.app import COMMANDS, cli
from playground.exercises import EXERCISES

MACHINES = {
    "one GPU": Machine(gpus=1, ranks=1, shares=False),
    "one GPU, shared": Machine(gpus=1, ranks=2, shares=True),
    "eight GPUs": Machine(gpus=8, ranks=8, shares=True),
}
MACHINE = MACHINES["one GPU"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_row_is_a_command_that_exists(machine: Machine, tmp_path: Path) -> None:
    """With options that it has. (What it refuses later, a GPU that is not there above all, is not asked.)"""
    commands = [row.command(machine, tmp_path) for row in ROWS if row.needs(machine)]
    assert len(commands) > 40
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
    assert {*COMMANDS} - tabled == {"scale", "break", "why", *EXERCISES}, "which know no backend but gloo"
    hangs_first = [row.words.split()[0] for row in ROWS[:2]]
    assert hangs_first == ["pipeline", "pipeline"]
    assert [row.is_last for row in ROWS] == [False] * (len(ROWS) - 1) + [True]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """One that is fine, one that fails, one that hangs, and the last."""
    monkeypatch.delenv("PLAYGROUND_SIMULATED_GPU", raising=False)
    programs = {
        "say": "import sys; print('first'); print(*sys.argv[1:])",
        "fail": "import sys; print('no luck', file=sys.stderr); sys.exit(3)",
        "hang": "import time; print('so far', flush=True); time.sleep(1000)",
    }
    for name, words in programs.items():
        monkeypatch.setitem(on_gpu.PROGRAMS, name, ("-c", words))
    return [
        Row("say {on}", verdict=lambda out: f"said | {last_line(out)}"), Row("fail", environ={"WHY": "1"}),
        Row("hang", limit=2), Row("say end", is_last=True),
    ]  # fmt: skip


def cells_of(table: str) -> list[list[str]]:
    """The cells of each row, without the heading."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.stress
def test_rows_are_printed_and_kept(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "gpu.md"
    assert not carry_out_all(rows, MACHINE, Log(kept), deadline=ENOUGH)
    out, err = capsys.readouterr()
    assert kept.read_text() == out
    said, failed, hung, last = cells_of(out)
    assert (said[0], said[1], said[3:]) == ("`say`", "1", ["0", "said / --backend nccl -n 1"])
    assert (failed[0], failed[3:]) == ("`WHY=1 fail`", ["3", "no luck"])
    assert (hung[0], hung[3:]) == ("`hang`", ["none", "not done after 2 s"])
    assert float(hung[2]) >= 2
    assert (last[0], last[3:]) == ("`say end`", ["0", "end"])
    assert "so far" in err
    fine = [rows[0], rows[3], Row("fail", code=3)]
    assert carry_out_all(fine, MACHINE, Log(kept), deadline=ENOUGH)


def test_what_is_left_when_the_time_is_up_is_listed(
    rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row has a limit of its own, and begins all the same."""
    assert not carry_out_all(rows, MACHINE, Log(tmp_path / "gpu.md"), deadline=0, begin=2)
    table, _, left = capsys.readouterr().out.rpartition("\n\n")
    assert [cells[0] for cells in cells_of(table)] == ["`say end`"]
    assert left == "Not done, take up with --begin 2: 2 `WHY=1 fail`, 3 `hang`.\n"


def test_a_simulated_gpu_says_so_and_leaves_no_figure(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAYGROUND_SIMULATED_GPU", "1")
    monkeypatch.setattr(on_gpu, "find_machine", lambda ranks: MACHINE)
    monkeypatch.setattr(on_gpu, "describe", lambda machine: "1 x none")
    monkeypatch.setattr(on_gpu, "ROWS", rows[:2])
    monkeypatch.setattr(sys, "argv", ["on_gpu.py"])
    monkeypatch.setattr(on_gpu, "KEPT", tmp_path / "gpu.md")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert on_gpu.main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    first, *_, last = lines = capsys.readouterr().out.splitlines()
    assert first == last == SIMULATED
    assert "| `say` | 1 | - | 0 | as it should be |" in lines
    assert not (tmp_path / "gpu.md").exists()
