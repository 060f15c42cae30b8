"""Training that is asked to end takes a snapshot, says how to resume, and ends later with the same
bits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run
from general_loop import sync_by_hand
from processes import wait_for_a_snapshot

from playground import PlaygroundError, Preempted, launch, preempted, report
from playground.checkpoint.folder import SnapshotSettings, find_snapshots
from playground.lessons.elastic.experiment import compare
from playground.training import resumable
from playground.training.loop import prepare_and_train, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings


@pytest.fixture
def settings(digits_folder: Path, tmp_path: Path) -> TrainingSettings:
    """Two epochs of five steps, and a test after each."""
    return TrainingSettings(
        folder=digits_folder, epochs=2, batch_size=8, limit=38,
        snapshots=SnapshotSettings(folder=tmp_path / "snapshots", every=1000),
    )  # fmt: skip


def wait_until_asked(rank: int, at: int, step: int) -> None:
    """After the step `at`, until this rank is asked to end; rank 0 has the launcher asked to end
    all."""
    if step == at:
        report(ask=rank == 0)
        while not preempted():
            time.sleep(0.002)


def train_until_asked(
    rank: int, size: int, settings: TrainingSettings, way: str, at: int
) -> TrainingResult:
    """Train; at the step `at`, rank 0 has the launcher asked to end. They vote after every step."""
    sync = {"sgd": sync_by_hand, "ddp": sync_with_ddp}[way]
    resumable.INTERVAL, usual = 0.0, resumable.INTERVAL
    try:
        return prepare_and_train(settings, sync, partial(wait_until_asked, rank, at))
    finally:
        resumable.INTERVAL = usual


def train(size: int, settings: TrainingSettings, way: str = "sgd", at: int = 0) -> TrainingResult:
    def on_report(rank: int, event: dict[str, Any]) -> None:
        if event.get("ask"):
            os.kill(os.getpid(), signal.SIGTERM)

    results = launch(
        train_until_asked, size, args=(settings, way, at), grace=60.0, on_report=on_report
    )
    result: TrainingResult = results[0]
    return result


def folder_of(settings: TrainingSettings) -> Path:
    assert settings.snapshots
    return settings.snapshots.folder


@pytest.mark.parametrize(
    ("size", "way", "moments"),
    [
        (2, "sgd", [1, 5]),
        *(
            pytest.param(*case, marks=pytest.mark.stress)
            for case in ((2, "sgd", range(1, 10)), (3, "ddp", [3]))
        ),
    ],
)
def test_the_end_has_the_same_bits(
    size: int, way: str, moments: list[int], settings: TrainingSettings, tmp_path: Path
) -> None:
    """Asked before the first step is done, in the midst of an epoch, before its test. Who is asked
    in the last step of all ends as usual."""
    assert settings.snapshots
    undisturbed = replace(
        settings, snapshots=replace(settings.snapshots, folder=tmp_path / "undisturbed")
    )
    expected = train(size, undisturbed, way)
    for at in moments:
        with pytest.raises(Preempted, match=f"^preempted by SIGTERM after step {at}$"):
            train(size, settings, way, at)
        assert find_snapshots(folder_of(settings))[0][0] == at
    result = train(size, settings, way, at=10)
    assert [epoch.loss for epoch in result.epochs] == [epoch.loss for epoch in expected.epochs]
    assert compare(0, 1, *map(folder_of, (undisturbed, settings))).differing == 0


def test_an_end_without_a_snapshot_is_no_success(settings: TrainingSettings) -> None:
    folder = folder_of(settings)
    (folder / ".unfinished").mkdir(parents=True)  # in the way
    with pytest.raises(
        PlaygroundError, match="SIGTERM came after step 2, and its snapshot could not be written"
    ):
        train(1, settings, at=2)


SCRIPT = Path(__file__).parents[1] / "support/resumable_script.py"


def words_of_run(data_dir: Path, folder: Path, epochs: int) -> list[Any]:
    """A script under `run`, with a snapshot in every fifth step. An epoch has five."""
    run = ("run", "-n", 2, "--restarts", 3, "--grace", 30)
    return [*run, SCRIPT, data_dir, folder, 5, 128, 600, epochs]


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


def test_the_script_of_a_command(data_dir: Path, run_cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with send_after_a_snapshot(folder, signal.SIGTERM):
        shown = run_cli(*words_of_run(data_dir, folder, 2000))
    step = find_snapshots(folder)[0][0]
    assert (shown.code, shown.out) == (os.EX_TEMPFAIL, "")
    assert f"preempted by SIGTERM after step {step}" in shown.err
    # to the end of that epoch, or beyond it
    again = run_cli(*words_of_run(data_dir, folder, max(1, step // 5)))
    assert (again.code, again.err) == (0, "")
