"""Training that is asked to end takes a snapshot, says how to go on, and ends later with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from mortals import CountedSteps
from processes import ENOUGH, by_hand, free_port, session_ends, wait_for_a_snapshot
from programs import ForkedProgram

from playground import PlaygroundError, Preempted, launch, preempted, report
from playground.console.training import command_to_go_on
from playground.console.training_options import Interval, SnapshotOptions, StepsOrSeconds
from playground.runtime import UsageError
from playground.survival.comparison import last_snapshot
from playground.survival.folder import MARKER, find_steps
from playground.survival.settings import SnapshotSettings
from playground.survival.snapshots import compare
from playground.training import resumable
from playground.training.loop import prepare_and_train, sync_by_hand, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.resumable import Agreement, Appointments
from playground.training.settings import TrainingSettings
from playground.training.sync import GradSync

Run = Callable[..., Any]


@pytest.fixture
def settings(digits_folder: Path, tmp_path: Path) -> TrainingSettings:
    """Two epochs of five steps, and a test after each."""
    return TrainingSettings(
        folder=digits_folder, epochs=2, batch_size=32, limit=150,
        snapshots=SnapshotSettings(folder=tmp_path / "snapshots", every=1000),
    )  # fmt: skip


class Asked(CountedSteps):
    """Does what `sync` does; in one step it waits until this rank is asked to end."""

    def __init__(self, sync: GradSync, at: int, asks: bool) -> None:
        super().__init__(sync)
        self.at, self.asks = at, asks

    def after_step(self, last: bool) -> None:
        super().after_step(last)
        if self.steps == self.at:
            report(ask=self.asks)
            while not preempted():
                time.sleep(0.002)


def train_until_asked(rank: int, size: int, settings: TrainingSettings, way: str, at: int) -> TrainingResult:
    """Train; at the step `at`, rank 0 has the launcher asked to end. At every step there is an appointment."""
    sync = {"sgd": sync_by_hand, "ddp": sync_with_ddp}[way]
    resumable.INTERVAL, usual = 0.0, resumable.INTERVAL
    try:
        return prepare_and_train(settings, lambda model, settings: Asked(sync(model, settings), at, rank == 0))
    finally:
        resumable.INTERVAL = usual


def train(size: int, settings: TrainingSettings, way: str = "sgd", at: int = 0) -> TrainingResult:
    def on_report(rank: int, event: dict[str, Any]) -> None:
        if event.get("ask"):
            os.kill(os.getpid(), signal.SIGTERM)

    results = launch(train_until_asked, size, args=(settings, way, at), grace=60.0, on_report=on_report)
    result: TrainingResult = results[0]
    return result


def folder_of(settings: TrainingSettings) -> Path:
    assert settings.snapshots
    return settings.snapshots.folder


@pytest.mark.parametrize(
    ("size", "way", "moments"),
    [(2, "sgd", [1, 5]), (3, "ddp", [3, 4]), pytest.param(2, "sgd", range(1, 10), marks=pytest.mark.stress)],
)
def test_the_end_has_the_same_bits(
    size: int, way: str, moments: list[int], settings: TrainingSettings, tmp_path: Path
) -> None:
    """Asked before the first step is done, in the midst of an epoch, before its test."""
    assert settings.snapshots
    undisturbed = replace(settings, snapshots=replace(settings.snapshots, folder=tmp_path / "undisturbed"))
    expected = train(size, undisturbed, way)
    for at in moments:
        with pytest.raises(Preempted, match=f"^preempted by SIGTERM after step {at}$"):
            train(size, settings, way, at)
        assert find_steps(folder_of(settings))[0] == at
    result = train(size, settings, way)
    assert [epoch.loss for epoch in result.epochs] == [epoch.loss for epoch in expected.epochs]
    assert compare(0, 1, *map(last_snapshot, map(folder_of, (undisturbed, settings)))).differing == 0


def test_training_that_is_asked_in_its_last_step_ends_as_usual(settings: TrainingSettings) -> None:
    assert len(train(2, settings, at=10).epochs) == 2


def test_an_end_without_a_snapshot_is_no_success(settings: TrainingSettings) -> None:
    folder = folder_of(settings)
    folder.mkdir()
    (folder / "step-00000002").write_text("in the way")
    with pytest.raises(PlaygroundError, match="SIGTERM came after step 2, and its snapshot could not be written"):
        train(1, settings, at=2)


def keep_appointments(rank: int, size: int, seconds: float | None) -> list[tuple[int, Agreement]]:
    diary = Appointments(100, seconds)
    kept = []
    for step in range(101, 161):
        time.sleep(0.001 * rank)
        met = step == diary.next_step
        agreement = diary.keep(step)
        if met:
            kept.append((step, agreement))
    return kept


@pytest.mark.parametrize("seconds", [None, 1e-9, 1e9])
def test_all_ranks_meet_at_the_same_steps(seconds: float | None, world: Run) -> None:
    kept = world(3).run(keep_appointments, seconds)
    assert kept[0] == kept[1] == kept[2]
    assert kept[0][0][0] == 101
    always = seconds == 1e-9
    assert {agreement for _, agreement in kept[0]} == {Agreement(save=always)}
    assert [step for step, _ in kept[0]] == [*range(101, 161)] or not always


@given(st.integers(1, 10**9))
def test_an_interval_in_steps(steps: int) -> None:
    assert StepsOrSeconds().convert(str(min(steps, 10**9 - 1)), None, None) == Interval(min(steps, 10**9 - 1))


@given(st.decimals("0.001", "1e8", places=3))
def test_an_interval_in_seconds(seconds: Any) -> None:
    assert StepsOrSeconds().convert(f"{seconds}s", None, None) == Interval(100, float(seconds))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_no_time_between_snapshots_is_refused(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a snapshot every .* s: use a finite number of seconds above 0"):
        SnapshotSettings(folder=tmp_path, seconds=seconds)


@pytest.mark.parametrize("words", [["0"], ["0s"], ["-1"], ["3 s"], ["1e3"], ["s"], ["10m"], ["٣"]])
def test_other_intervals_are_refused(words: list[str], run_cli: Run, tmp_path: Path) -> None:
    shown = run_cli("sgd", "--snapshots", tmp_path, "--snapshot-every", *words)
    assert (shown.code, shown.out) == (2, "")
    assert f"{words[0]!r} is neither a number of steps, such as 100, nor of seconds, such as 30s." in shown.err


@pytest.mark.parametrize("words", [["--grace", "3"], ["--snapshot-every", "3s"]])
def test_options_without_snapshots_are_refused(words: list[str], run_cli: Run) -> None:
    shown = run_cli("sgd", *words)
    assert (shown.code, shown.out) == (2, "")
    assert f"{words[0]} has no effect without --snapshots" in shown.err


def test_the_command_to_go_on_takes_the_newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = SnapshotOptions(
        snapshots=tmp_path, snapshot_every=Interval(3), keep=2, resume="no", restarts=0, grace=30.0
    )  # fmt: skip
    words = ["sgd", "--snapshots", "a folder", "--resume", "no"]
    monkeypatch.setattr(sys, "argv", ["playground", *words])
    assert shlex.split(command_to_go_on(asked)) == ["python", "-m", "playground", *words, "--resume", "auto"]
    assert shlex.split(command_to_go_on(replace(asked, resume="auto"))) == ["python", "-m", "playground", *words]


@pytest.fixture
def words(data_dir: Path, tmp_path: Path) -> list[Any]:
    """A training that would take some time."""
    return [
        "sgd", "--dataset", "digits", "--data-dir", data_dir, "--limit", 600, "--epochs", 2000, "--json",
        "--snapshots", tmp_path / "snapshots",
    ]  # fmt: skip


@contextlib.contextmanager
def send_after_a_snapshot(folder: Path, number: int) -> Iterator[None]:
    """Send this process a signal when there is a snapshot."""

    def send() -> None:
        wait_for_a_snapshot(folder)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_command(number: signal.Signals, words: list[Any], run_cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with send_after_a_snapshot(folder, number):
        shown = run_cli(*words, "-n", 2, "--snapshot-every", "0.05s", "--restarts", 3)
    step = find_steps(folder)[0]
    marker = folder / MARKER
    assert shown.code == os.EX_TEMPFAIL
    assert shown.err == f"playground: preempted by {number.name} after step {step}; {marker} says how to go on\n"
    assert json.loads(shown.out)["stopped_by"] == shown.err.removeprefix("playground: ").strip()
    about = dict(line.split(": ", 1) for line in marker.read_text().splitlines())
    assert (about["step"], about["signal"]) == (str(step), number.name)
    assert shlex.split(about["command"])[:4] == ["python", "-m", "playground", "sgd"]
    again = run_cli(*words, "-n", 2, "--epochs", max(1, step // 5))  # to the end of that epoch, or beyond it
    assert (again.code, again.err) == (0, "")
    assert not marker.exists()


def test_processes_that_fetch_batches_leave_a_signal_to_the_ranks(
    words: list[Any], fork_program: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    process = fork_program("playground", *words, "--loader", "per-sample", "--loader-workers", 1, "--snapshot-every", 1)
    wait_for_a_snapshot(tmp_path / "snapshots")
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=ENOUGH)
    assert (process.returncode, err[:32]) == (os.EX_TEMPFAIL, "playground: preempted by SIGTERM")
    assert session_ends(process.pid)


def test_ranks_that_somebody_else_has_started(
    words: list[Any], fork_program: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    """One of them is asked; rank 0 says so, and both end."""
    port, folder = free_port(), tmp_path / "snapshots"
    more = ("--snapshot-every", "0.1s")
    ranks = [fork_program("playground", *words, *more, **by_hand(rank, 2, port)) for rank in range(2)]
    wait_for_a_snapshot(folder)
    ranks[1].send_signal(signal.SIGUSR1)
    errors = [program.communicate(timeout=ENOUGH)[1] for program in ranks]
    step = find_steps(folder)[0]
    assert [program.returncode for program in ranks] == [os.EX_TEMPFAIL] * 2
    assert errors == [f"playground: preempted by SIGUSR1 after step {step}; {folder / MARKER} says how to go on\n", ""]
    assert "command of each rank: python -m playground sgd" in (folder / MARKER).read_text()


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--signals-to-handle")


@pytest.mark.stress
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun(number: signal.Signals, words: list[Any], tmp_path: Path) -> None:
    """It passes its own signal on, and no exit code: the file tells."""
    folder = tmp_path / "snapshots"
    command = [*TORCHRUN, "SIGTERM,SIGUSR1", "--master-port", free_port(), "-m", "playground", *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as torchrun:
        wait_for_a_snapshot(folder)
        torchrun.send_signal(number)
        _, err = torchrun.communicate(timeout=ENOUGH)
    step = find_steps(folder)[0]
    assert f"playground: preempted by {number.name} after step {step}" in err
    assert f"step: {step}\nsignal: {number.name}\n" in (folder / MARKER).read_text()
    assert session_ends(torchrun.pid)
