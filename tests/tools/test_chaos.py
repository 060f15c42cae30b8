"""Processes of a training are killed from outside, and its end has the same bits; what cannot be killed is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from processes import ENOUGH, by_hand, session_ends

from playground.app import run as run_command_line
from playground.runtime import PlaygroundError
from playground.runtime.backends import BACKENDS
from playground.survival.comparison import Comparison
from playground.tools.chaos import page, processes
from playground.tools.chaos.page import Training, train_undisturbed
from playground.tools.chaos.processes import Processes, find_processes, opened_in
from playground.tools.chaos.results import FORK_SERVER, LAUNCHER, PHASES, RANK, WHOM, Draws, Kill, RunRecord

Run = Callable[..., Any]


@pytest.fixture
def chaos(run_cli: Run, data_dir: Path) -> Run:
    """`chaos(lesson, *its_options, **options_of_chaos)`, on a few digits; its exit code and its document."""

    def run(lesson: str, *words: Any, **options: Any) -> tuple[int, Any]:
        ours = [word for name, value in options.items() for word in (f"--{name}", value)]
        few = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 128, "--batch-size", 32)
        shown = run_cli("chaos", *ours, "--json", "--", lesson, *few, *words)
        assert shown.err == ""
        return shown.code, json.loads(shown.out)

    return run


def check_kills(document: Any, kills: int, size: int) -> None:
    """All of them have happened and been overcome; the command has blamed whom it should."""
    runs = document["runs"]
    assert [run["comparison"]["differing"] for run in runs] == [0] * len(runs)
    assert [(run["code"], run["unexplained"]) for run in runs] == [(0, [])] * len(runs)
    happened = [kill for run in runs for kill in run["kills"]]
    assert len(happened) == kills
    ranks = {f"rank {rank} of {size} was killed by SIGKILL" for rank in range(size)} | {""}
    for kill in happened:
        assert kill["phase"] in PHASES
        assert kill["role"] == FORK_SERVER or kill["said"] in ranks
        assert kill["role"] != LAUNCHER or kill["said"] == ""


def test_a_training_whose_rank_is_killed_ends_the_same(chaos: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The undisturbed command runs twice where a device may not repeat itself."""
    trained: list[str] = []

    def train(words: tuple[str, ...], folder: Path) -> RunRecord:
        trained.append(folder.name)
        return train_undisturbed(words, folder)

    monkeypatch.setattr(page, "train_undisturbed", train)
    monkeypatch.setattr(BACKENDS["gloo"], "may_differ", "it may be the weather")
    code, document = chaos("sgd", "-n", 2, "--epochs", 4, "--snapshot-every", 1, kills=1)
    assert (code, trained) == (0, ["undisturbed", "repeated"])
    check_kills(document, kills=1, size=2)


def test_a_device_that_does_not_repeat_itself_is_found_before_any_kill(
    run_cli: Run, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the undisturbed command ends otherwise the second time, kills prove nothing. (Another seed stands for the
    device; the command runs in this process.)"""
    trained: list[str] = []

    def train(words: tuple[str, ...], folder: Path) -> RunRecord:
        trained.append(folder.name)
        seed = ("--seed", "7") if folder.name == "repeated" else ()
        monkeypatch.setattr(sys, "argv", ["playground", *map(str, words), *seed, "--snapshots", str(folder)])
        with pytest.raises(SystemExit) as exit_:
            run_command_line()
        return RunRecord(code=int(exit_.value.code or 0))

    monkeypatch.setattr(page, "train_undisturbed", train)
    monkeypatch.setattr(BACKENDS["gloo"], "may_differ", "it may be the weather")
    few = ("--dataset", "digits", "--data-dir", data_dir, "--limit", 128, "--batch-size", 32)
    shown = run_cli("chaos", "--kills", 1, "--", "sgd", "-n", 1, "--epochs", 2, "--snapshot-every", 1, *few)
    assert (shown.code, trained) == (1, ["undisturbed", "repeated"])
    assert "already end with different bits" in shown.err
    assert "it may be the weather" in shown.err


@pytest.mark.stress
def test_ranks_that_are_killed_are_named(chaos: Run) -> None:
    """At least those that are killed in the midst of the training."""
    code, document = chaos("sgd", "-n", 2, "--epochs", 4, "--snapshot-every", 1, kills=3)
    assert code == 0
    check_kills(document, kills=3, size=2)
    assert any(kill["said"] for run in document["runs"] for kill in run["kills"])


@pytest.mark.stress
@pytest.mark.parametrize(
    ("lesson", "size", "whom", "kills"),
    [("sgd", 2, "rank", 60), ("ddp", 3, "rank", 60), ("sgd", 4, "any", 15), ("ddp", 2, "launcher", 5)],
)
def test_many_kills_leave_no_trace(lesson: str, size: int, whom: str, kills: int, chaos: Run) -> None:
    options = ("-n", size, "--epochs", 30, "--snapshot-every", 2)
    code, document = chaos(lesson, *options, kills=kills, whom=whom, seed=kills)
    assert code == 0
    check_kills(document, kills, size)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["hello"], "hello is none: take sgd, ddp"),
        (["no-such-lesson"], "no-such-lesson is none"),
        (["elastic"], "elastic is none"),
        (["sgd", "--snapshots", "x"], "chaos sets --snapshots of sgd itself"),
        (["ddp", "--restarts", "3"], "chaos sets --restarts of ddp itself"),
        (["sgd", "--resume", "no"], "chaos sets --resume of sgd itself"),
        (["sgd", "--json"], "chaos does not show what sgd prints: put --json before --"),
        (["sgd", "--no-such-option"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_killed_and_go_on_is_refused(words: list[str], why: str, run_cli: Run) -> None:
    shown = run_cli("chaos", "--", *words)
    assert (shown.code, shown.out) == (2, "")
    assert why in shown.err
    assert len(shown.err.splitlines()) == 1


def test_no_command_is_started_in_a_folder_that_is_not_empty(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    shown = run_cli("chaos", "--dir", tmp_path, "--", "sgd")
    assert shown.code == 2
    assert "it is not empty; choose a new folder" in shown.err


def test_a_command_that_cannot_be_run_says_why(run_cli: Run, data_dir: Path) -> None:
    shown = run_cli("chaos", "--", "sgd", "--dataset", "digits", "--data-dir", data_dir, "--limit", 700)
    assert shown.code == 2
    assert shown.err == "playground: sgd: --limit 700: digits has 600 samples to train on\n"


def test_a_world_that_is_joined_is_left_alone(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_hand(0, 1, "29500").items():
        monkeypatch.setenv(name, value)
    shown = run_cli("chaos", "--", "sgd")
    assert (shown.code, shown.out) == (2, "")
    assert "run it without torchrun" in shown.err


def test_without_proc_it_says_so(run_cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    shown = run_cli("chaos", "--", "sgd")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.endswith("which this system has not: run it on Linux\n")


def test_a_process_without_ranks_has_none() -> None:
    found = find_processes(1 << 30)
    assert found == Processes(1 << 30, None, ())
    assert [found.of_role(role) for role in (LAUNCHER, FORK_SERVER, RANK)] == [[1 << 30], [], []]


def test_files_that_a_process_has_open_are_found(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("")
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with open(tmp_path / "read"), open(tmp_path / "written", "w"):
        assert sorted(opened_in(tmp_path, os.getpid())) == sorted([os.O_DIRECTORY, os.O_RDONLY, os.O_WRONLY])
    os.close(folder)
    assert opened_in(tmp_path, os.getpid()) == []


def test_files_in_a_folder_with_a_longer_name_are_none_of_its(tmp_path: Path) -> None:
    """And those in a folder that is named by a link are."""
    (tmp_path / "killed-1").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "killed-1")
    with open(tmp_path / "killed-10", "w"):
        assert opened_in(tmp_path / "killed-1", os.getpid()) == []
    with open(tmp_path / "killed-1" / "file", "w"):
        assert opened_in(tmp_path / "link", os.getpid()) == [os.O_WRONLY]


@pytest.mark.parametrize("role", [RANK, FORK_SERVER])
def test_a_stranger_with_a_number_of_ours_is_not_killed(role: str, tmp_path: Path) -> None:
    """What ended between the look and the kill has left its number to the next process."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with stranger, Training(("hello", "--help"), tmp_path) as training:
        assert training.kill(role, stranger.pid) is False
        assert training.record.kills == []
        stranger.communicate(b"\n", timeout=ENOUGH)
    assert stranger.returncode == 0


FOLLOW = """
import sys
from pathlib import Path
from playground.tools.chaos.processes import CommandProcess

words = ("sgd", "-n", "2", "--epochs", "100000", "--dataset", "digits", "--data-dir", sys.argv[1])
command = CommandProcess(words, Path(sys.argv[2]), 0)
print(command.pid, flush=True)
sys.stdin.read()
"""


def test_a_command_ends_when_chaos_is_killed(tmp_path: Path, data_dir: Path) -> None:
    """At once, with its ranks, and not when it next has something to say."""
    words = [sys.executable, "-c", FOLLOW, str(data_dir), str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chaos:
        assert chaos.stdout
        session = int(chaos.stdout.readline())
        deadline = time.monotonic() + ENOUGH
        while not find_processes(session).ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        assert find_processes(session).ranks
        chaos.kill()
    assert session_ends(session)


@given(st.integers(0, 2**32), st.sampled_from(sorted(WHOM)), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_seed_decides_who_is_killed_and_when(seed: int, whom: str, starting: float, training: float) -> None:
    one, other = Draws(seed, whom), Draws(seed, whom)
    role, delay = one.role(), one.delay(starting, training)
    assert (role, delay) == (other.role(), other.delay(starting, training))
    assert role in WHOM[whom]
    assert 0 <= delay <= starting + 3 * training
    assert one.process([5, 6, 7]) == other.process([5, 6, 7])


KILL = Kill(role=RANK, pid=1, at=0.5, phase="saving", step=0)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (RunRecord(kills=[KILL], code=1, notices=["out of luck"]), "exit code 1 after 1 kills: out of luck"),
        (RunRecord(kills=[KILL], code=1), "it said nothing"),
        (RunRecord(unexplained=["rank 1 of 2 failed"]), "failed where no process was killed: rank 1 of 2 failed"),
        (RunRecord(comparison=Comparison(tensors=1, nbytes=8, differing=1)), "1 of 8 bytes differ"),
    ],
)
def test_a_run_that_ended_otherwise_is_no_success(record: RunRecord, why: str) -> None:
    with pytest.raises(PlaygroundError, match=why):
        record.check()
    RunRecord(kills=[KILL], comparison=Comparison(tensors=1, nbytes=8, differing=0)).check()
