"""The command `sgd`: the lesson's loop, or the general one where another way to synchronise is asked for."""

from __future__ import annotations

from typing import Any

import click

from playground.console.options import RunOptions, run_options
from playground.console.training import train_and_show
from playground.console.training_options import (
    DataOptions,
    SnapshotOptions,
    data_options,
    loader_options,
    snapshot_options,
    sync_options,
    training_options,
)
from playground.lessons import LESSONS
from playground.runtime.remote import remote

LESSON = LESSONS["sgd"]


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@training_options
@sync_options
@loader_options
@data_options
@snapshot_options
def command(run: RunOptions, data: DataOptions, survival: SnapshotOptions, **training: Any) -> None:
    general = remote("playground.training.loop:train_by_hand")
    train_and_show(LESSON, general, run, data, survival, **training)
