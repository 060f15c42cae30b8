"""Processes that fetch batches: they change no result, end with their rank, and their own end is explained."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.utils.data._utils.worker as torch_worker
from processes import ENOUGH, is_first_epoch, session_ends, session_members
from programs import ForkedProgram

from playground.lessons import LESSONS
from playground.runtime import RankFailed
from playground.runtime.remote import Remote
from playground.testing import World
from playground.training.data import partition_dataset, training_images
from playground.training.digits import write_digits
from playground.training.image_files import UnreadableImage, list_image_files, prepare_image_files
from playground.training.loader import explain_lost_worker, run_training
from playground.training.results import Epoch
from playground.training.settings import TrainingSettings

Worlds = Callable[..., World]
Fork = Callable[..., ForkedProgram]
HOURS = 3600.0
TRAINING = ("sgd", "-n", "2", "--epochs", "100000", "--loader", "paths", "--loader-workers", "2", "--dataset", "digits")


def epochs(world: World, lesson: str, folder: Path, **changes: Any) -> list[Epoch]:
    """What two epochs bring, but for their times."""
    settings = TrainingSettings(folder=folder, limit=130, epochs=2, batch_size=16, **changes)
    result = world.run(run_training, LESSONS[lesson].remote("run"), settings)[0]
    return [replace(epoch, seconds=0, samples_per_second=0) for epoch in result.epochs]


@pytest.mark.parametrize("lesson", ["sgd", pytest.param("ddp", marks=pytest.mark.stress)])
def test_training_is_the_same_to_the_last_bit(lesson: str, world: Worlds, digits_folder: Path) -> None:
    """Dropout masks of the second epoch included: a loader draws a random number for each epoch."""
    prepare_image_files(digits_folder, 130)
    alone = epochs(world(2), lesson, digits_folder, loader="per-sample")
    assert epochs(world(2), lesson, digits_folder, loader="paths", loader_workers=2) == alone


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "digits" / "raw"
    folder.mkdir(parents=True)
    write_digits(folder, 40, 10)
    prepare_image_files(folder)
    return folder


@pytest.mark.parametrize(
    ("content", "why", "workers"), [(None, "No such file or directory", 1), (b"\x89PNG", "it is damaged", 0)]
)
def test_an_image_that_is_gone_or_damaged_is_named(
    content: bytes | None, why: str, workers: int, world: Worlds, small_folder: Path
) -> None:
    path = Path(list_image_files(small_folder)[7][0])
    path.unlink()
    if content:
        path.write_bytes(content)
    settings = TrainingSettings(folder=small_folder, batch_size=10, loader="paths", loader_workers=workers)
    with pytest.raises(UnreadableImage) as caught:
        world(1).run(run_training, LESSONS["sgd"].remote("run"), settings)
    assert str(caught.value) == f"{path}: {why}; the next run writes it again before it starts"


def lose(rank: int, size: int, settings: TrainingSettings, whom: str, note: Path) -> None:
    """Fetch batches for ever; after the first ones rank 1, or a worker of its, is killed. `note`: its workers' ids."""
    torch_worker.MP_STATUS_CHECK_INTERVAL = HOURS  # workers must not wait until torch looks for their rank
    train_set, _ = partition_dataset(
        training_images(settings), settings.batch_size, num_workers=settings.loader_workers
    )
    while True:
        for _ in train_set:
            dist.barrier()
            if rank == 1 and not note.exists():
                workers = [child.pid for child in active_children() if child.pid]
                note.write_text(" ".join(map(str, workers)))
                os.kill(os.getpid() if whom == "rank" else workers[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("whom", "said"),
    [
        ("rank", "was killed by SIGKILL"),
        (
            "worker",
            "lost a process that fetches its batches (DataLoader worker (pid {}) is killed by signal: Killed): ",
        ),
    ],
)
def test_rank_and_workers_end_together(
    whom: str, said: str, world: Worlds, digits_folder: Path, tmp_path: Path
) -> None:
    prepare_image_files(digits_folder)
    settings = TrainingSettings(folder=digits_folder, loader="paths", loader_workers=2)
    with pytest.raises(RankFailed) as caught:
        world(2).run(run_training, Remote(__name__, lose.__name__), settings, (whom, tmp_path / "note"))
    workers = [int(pid) for pid in (tmp_path / "note").read_text().split()]
    assert len(workers) == 2
    assert str(caught.value).startswith(f"rank 1 of 2 {said.format(workers[0])}")
    assert "\n" not in str(caught.value)
    deadline = time.monotonic() + ENOUGH
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.stress
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_no_worker_outlives_the_launcher(number: int, code: int, fork_program: Fork, data_dir: Path) -> None:
    program = fork_program("playground", *TRAINING, "--data-dir", data_dir)
    assert any(map(is_first_epoch, program.stdout))
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in session_members(program.pid)]
    assert names.count("pt_data_worker") == 4
    program.send_signal(number)
    assert program.wait(timeout=ENOUGH) == code
    assert session_ends(program.pid)


def test_workers_leave_nothing_when_their_group_is_killed(
    start_cli: Callable[..., subprocess.Popen[str]], data_dir: Path, tmp_path: Path
) -> None:
    """Nor does torch: no folder for code that nothing compiles."""
    program = start_cli(*TRAINING, "--data-dir", data_dir, TMPDIR=str(tmp_path))
    assert program.stdout
    assert any(map(is_first_epoch, program.stdout))
    assert [each.name.split("-")[0] for each in tmp_path.iterdir()] == ["pymp"] * 4
    os.killpg(program.pid, signal.SIGKILL)
    assert session_ends(program.pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "(pid 7) is killed by signal: Killed)"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "(pid(s) 7, 8) exited unexpectedly)"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details …", "(pid 7) exited unexpectedly)"),
    ],
)
def test_whatever_torch_says_of_a_lost_worker_is_one_line(said: str, lost: str) -> None:
    with pytest.raises(RankFailed) as caught, explain_lost_worker(1, 2):
        raise RuntimeError(said)
    assert str(caught.value).startswith("rank 1 of 2 lost a process that fetches its batches")
    assert lost in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory$"), explain_lost_worker(1, 2):
        raise RuntimeError("out of memory")
