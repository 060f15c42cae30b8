"""Training that is asked to end takes a snapshot, says how to resume, and ends later with the same
bits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run, Start
from general_loop import sync_by_hand
from gpus import COLD
from processes import ENOUGH, by_hand, free_port, session_ends, wait_for_a_snapshot
from programs import ForkedProgram

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


@pytest.fixture
def words(data_dir: Path, tmp_path: Path) -> list[Any]:
    """A training that would take some time."""
    return [
        "ddp", "--dataset", "digits", "--data-dir", data_dir, "--limit", 600, "--epochs", 2000,
        "--json",
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


def test_the_command(words: list[Any], run_cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    with send_after_a_snapshot(folder, signal.SIGTERM):
        shown = run_cli(*words, "-n", 2, "--snapshot-every", 5, "--restarts", 3)
    step = find_snapshots(folder)[0][0]
    assert shown.code == os.EX_TEMPFAIL
    assert (
        shown.err
        == f"playground: preempted by SIGTERM after step {step}; the same command resumes from "
        "there\n"
    )
    assert shown.out == ""
    # to the end of that epoch, or beyond it
    again = run_cli(*words, "-n", 2, "--epochs", max(1, step // 5))
    assert (again.code, again.err) == (0, "")


def test_ranks_that_somebody_else_has_started(
    words: list[Any], fork_program: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    """One of them is asked; rank 0 says so, and both end."""
    port, folder = free_port(), tmp_path / "snapshots"
    more = ("--snapshot-every", 5)
    ranks = [
        fork_program("playground", *words, *more, **by_hand(rank, 2, port)) for rank in range(2)
    ]
    wait_for_a_snapshot(folder)
    ranks[1].send_signal(signal.SIGTERM)
    errors = [program.communicate(timeout=ENOUGH)[1] for program in ranks]
    step = find_snapshots(folder)[0][0]
    assert [program.returncode for program in ranks] == [os.EX_TEMPFAIL] * 2
    how = "the same command resumes from there"
    assert errors == [f"playground: preempted by SIGTERM after step {step}; {how}\n", ""]


@pytest.fixture
def endless(data_dir: Path) -> tuple[Any, ...]:
    """A training that somebody has to end."""
    words = (
        "ddp",
        "--backend",
        "nccl",
        "--dataset",
        "digits",
        "--data-dir",
        data_dir,
        "--limit",
        600,
    )
    return (*words, "--epochs", 100_000, "--snapshot-every", 20)


@pytest.mark.gpu
@pytest.mark.stress
def test_training_that_is_asked_to_end_can_be_resumed(
    endless: Any, start_cli: Start, nccl_size: int, tmp_path: Path
) -> None:
    run = start_cli(*endless, "-n", nccl_size, "--snapshots", tmp_path)
    wait_for_a_snapshot(tmp_path, COLD)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=COLD)
    assert run.returncode == os.EX_TEMPFAIL, err
    assert f"preempted by SIGTERM after step {find_snapshots(tmp_path)[0][0]}" in err
    assert session_ends(run.pid)


@pytest.mark.gpu
@pytest.mark.stress
def test_a_rank_that_is_lost_is_named_by_the_others(
    endless: Any, start_cli: Start, pair: int, tmp_path: Path
) -> None:
    """They wait in the driver, for their GPU, and no connection that ends gets them out of
    there."""
    port = free_port()
    runs = [
        start_cli(
            *endless, "--snapshots", tmp_path, **by_hand(rank, pair, port), LOCAL_RANK=str(rank)
        )
        for rank in range(pair)
    ]
    wait_for_a_snapshot(tmp_path, COLD)
    runs[-1].kill()
    for run in runs[:-1]:
        _, err = run.communicate(timeout=COLD)
        assert run.returncode == 1, err
        assert f"of {pair} lost rank {pair - 1} (" in err
