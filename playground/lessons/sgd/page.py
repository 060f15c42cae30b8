"""The command `sgd`: the lesson's loop, or the general one where another way to synchronise is
asked for."""

from __future__ import annotations

from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.training import (
    DataOptions,
    SnapshotOptions,
    data_options,
    snapshot_options,
    train_and_show,
)
from playground.lessons import LESSONS
from playground.runtime.remote import remote
from playground.training.settings import TrainingSettings

LESSON = LESSONS["sgd"]


@LESSON.run_by(
    flags(
        TrainingSettings,
        *("epochs", "batch_size", "lr", "momentum", "accumulate", "loader"),
        *("sync", "sync_every", "all_reduce", "link", "dtype"),
    ),
    data_options(),
    snapshot_options,
)
def command(
    session: Session, data: DataOptions, checkpoint: SnapshotOptions, **training: Any
) -> None:
    general = remote("playground.training.loop:train_by_hand")
    train_and_show(session, LESSON, general, data, checkpoint, **training)
