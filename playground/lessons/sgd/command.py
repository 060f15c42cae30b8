"""The command `sgd`: the lesson's loop, or the general one where another way to synchronise is asked for."""

from __future__ import annotations

from typing import Any

from playground.console.session import Session
from playground.console.training import (
    DataOptions,
    SnapshotOptions,
    data_options,
    loader_options,
    snapshot_options,
    sync_options,
    train_and_show,
    training_options,
)
from playground.lessons import LESSONS
from playground.runtime.remote import remote

LESSON = LESSONS["sgd"]


@LESSON.run_by(training_options, sync_options, loader_options, data_options, snapshot_options)
def command(session: Session, data: DataOptions, survival: SnapshotOptions, **training: Any) -> None:
    general = remote("playground.training.loop:train_by_hand")
    train_and_show(session, LESSON, general, data, survival, **training)
