"""The trainings of the command `elastic`, with ranks that are killed: the board's, or
DistributedDataParallel's in the general loop, training/loop.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial

from playground.lessons.elastic import lesson
from playground.lessons.elastic.comparison import BOARD_FILE
from playground.lessons.elastic.page import Kill
from playground.runtime import device, report, restart_count, synchronize
from playground.runtime.backends import backend_of
from playground.training.loop import prepare_and_train, run_board, sync_with_ddp
from playground.training.results import TrainingResult
from playground.training.resumable import DRAWS_FROM
from playground.training.settings import TrainingSettings


def run(
    rank: int, size: int, settings: TrainingSettings, way: str, kills: Sequence[Kill]
) -> TrainingResult:
    """Train `Net` as the lesson `way`, sgd or ddp, from the newest snapshot on. Every rank returns
    the same figures: of sgd, those of the epochs that ended since the last restart.

    Each time the world is started, the next of `kills` happens.
    """
    assert settings.snapshots, "a training that is killed resumes from a snapshot"
    after_step = partial(die_if_due, rank, kills)
    if way == "ddp":
        return prepare_and_train(settings, sync_with_ddp, after_step)
    backend_of().use_deterministic_kernels()
    folder = settings.snapshots.folder
    folder.mkdir(parents=True, exist_ok=True)
    board = partial(
        lesson.run, file=folder / BOARD_FILE, every=settings.snapshots.every,
        rng=DRAWS_FROM[device().type],
        after_resume=lambda step: report(resumed={"total": step}), after_step=after_step,
    )  # fmt: skip
    return run_board(rank, size, settings, board)


def die_if_due(rank: int, kills: Sequence[Kill], step: int) -> None:
    """Be killed after this step, if that is what is to happen. Nothing warns the rank, and nothing
    is tidied up."""
    synchronize()  # on a GPU a step is issued long before it is done
    report(stepped=step)
    if (rank, step) in kills[restart_count() : restart_count() + 1]:
        report(killed=step)
        os.kill(os.getpid(), signal.SIGKILL)
