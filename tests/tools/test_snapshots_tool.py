"""The tool that looks at snapshots: what it lists, what it finds damaged, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from widths import too_wide

from playground.console.rendering import render
from playground.survival.folder import Examined, find_steps, step_folder
from playground.survival.snapshots import Snapshots, State
from playground.tools.snapshots import page
from playground.tools.snapshots.page import SaveTimes, check_times

Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snapshots of two ranks at steps 10, 20 and 30, whole."""
    for rank in range(2):
        with Snapshots(tmp_path, {"lr": 0.1}, rank=rank, size=2) as snapshots:
            for step in (10, 20, 30):
                snapshots.save(step, State(shared={"weights": torch.ones(300)}, own={"rank": rank}))
    return tmp_path


def rows(out: str) -> list[list[str]]:
    """The rows of the table, by their cells; the condition as one."""
    lines = out.split("\n\n")[1].splitlines()[1:]
    return [line.split(maxsplit=6) for line in lines]


def damage(file: Path) -> None:
    """Change its last byte, and not its length."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("what", ["ls", "verify"])
def test_what_is_whole_is_listed(folder: Path, run_cli: Run, what: str) -> None:
    shown = run_cli("snapshots", what, folder)
    assert (shown.code, shown.err) == (0, "")
    assert " ".join(shown.out.split()).startswith(f"snapshots: {folder} ")
    assert [(row[0], row[1], row[-1]) for row in rows(shown.out)] == [
        (step, "2", "whole") for step in ("10", "20", "30")
    ]
    assert "3 of 3 snapshots are whole" in shown.out
    assert "A run would go on from step 30." in " ".join(shown.out.split())


def test_only_verify_reads_the_files(folder: Path, run_cli: Run) -> None:
    damage(step_folder(folder, 30) / "rank-1.snapshot")
    assert [row[-1] for row in rows(run_cli("snapshots", "ls", folder).out)] == ["whole"] * 3
    shown = run_cli("snapshots", "verify", folder)
    assert (shown.code, shown.err) == (1, "playground: damaged: step 30\n")
    assert rows(shown.out)[-1][-1].startswith("damaged: the checksum of rank-1.snapshot")
    assert "A run would go on from step 20." in " ".join(shown.out.split())


def test_what_a_killed_run_leaves_is_no_failure(folder: Path, run_cli: Run) -> None:
    (step_folder(folder, 30) / "rank-1.snapshot").unlink()
    shown = run_cli("snapshots", "verify", folder)
    assert (shown.code, shown.err) == (0, "")
    assert rows(shown.out)[-1][-1] == "incomplete: rank-1.snapshot is missing"
    for step in (10, 20):
        (step_folder(folder, step) / "rank-0.snapshot").unlink()
    shown = run_cli("snapshots", "verify", folder)
    assert (shown.code, shown.err) == (1, "playground: no snapshot is whole: a run cannot go on from here\n")
    assert "No run can go on from here." in " ".join(shown.out.split())


def test_lines_about_many_defects_stay_within_80_columns(
    folder: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for file in step_folder(folder, 20).glob("*.snapshot"):
        os.truncate(file, 17)
    shown = run_cli("snapshots", "verify", folder)
    assert shown.err == "playground: damaged: step 20\n"
    assert too_wide(shown.out) == []


def test_the_document_has_every_defect(folder: Path, run_cli: Run) -> None:
    file = step_folder(folder, 20) / "rank-0.snapshot"
    os.truncate(file, file.stat().st_size - 3)
    document = json.loads(run_cli("snapshots", "ls", folder, "--json").out)
    assert document["contents_read"] is False
    whole, damaged, _ = document["snapshots"]
    assert (whole["step"], whole["size"], whole["condition"], whole["defects"]) == (10, 2, "whole", [])
    assert whole["fingerprint"] == {"lr": 0.1}
    assert damaged["condition"] == "damaged"
    assert re.fullmatch(r"rank-0\.snapshot has [0-9,]+ of [0-9,]+ bytes", damaged["defects"][0])


@pytest.mark.parametrize("what", ["ls", "verify"])
@pytest.mark.parametrize(
    ("name", "why"),
    [("none", "there is no folder {}: give"), ("file", "there is no folder {}"), ("", "{} holds no sna")],
)
def test_a_folder_that_is_none_is_refused(tmp_path: Path, run_cli: Run, what: str, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    shown = run_cli("snapshots", what, tmp_path / name)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith(f"playground: {why.format(tmp_path / name)}")
    assert shown.err.count("\n") == 1


def test_measured_snapshots_are_snapshots(tmp_path: Path, run_cli: Run) -> None:
    words = ("snapshots", "measure", tmp_path / "run", "-n", 2, "--memory", "10K", "--saves", 4, "--keep", 2, "--json")
    document = json.loads(run_cli(*words).out)
    times = document["steps"][0]["ranks"]
    assert [len(each["blocked"]) for each in times] == [4, 4]
    assert all(b <= w for each in times for b, w in zip(each["blocked"], each["written"], strict=True))
    assert find_steps(tmp_path / "run") == [4, 3]
    assert run_cli("snapshots", "verify", tmp_path / "run").code == 0
    again = run_cli(*words)
    assert (again.code, again.out) == (2, "")
    assert "holds snapshots (up to step 4)" in again.err


def test_more_memory_than_there_is_is_refused(tmp_path: Path, run_cli: Run) -> None:
    shown = run_cli("snapshots", "measure", tmp_path / "run", "--memory", "999999999999G")
    assert (shown.code, shown.out) == (2, "")
    assert "bytes are free, choose less" in shown.err
    assert not (tmp_path / "run").exists()


def test_a_problem_of_a_rank_fails_the_measurement() -> None:
    fine, full = (SaveTimes(blocked=[0.1], written=[0.2], problem=problem) for problem in ("", "no room"))
    check_times([fine, fine])
    with pytest.raises(Exception, match="no room"):
        check_times([fine, full])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert page.format_age(seconds) == text


def test_what_is_unknown_is_a_dash(tmp_path: Path) -> None:
    empty = Examined(folder=tmp_path, step=1234567, condition="incomplete", defects=["rank-0.snapshot is missing"])
    old = Examined(folder=tmp_path, step=2, size=3, nbytes=2048, written=time.time() - 3 * 86400)
    lines = render([page.snapshots_table([old, empty])], 80).splitlines()
    assert lines[1].split() == ["2", "3", "2", "KiB", "3", "days", "whole"]
    assert lines[2].split() == ["1,234,567", "-", "0", "B", "-", "incomplete:", "rank-0.snapshot", "is", "missing"]
