"""The command `sgd`: the lesson's loop, or the general one where another way to synchronise is asked for."""

from __future__ import annotations

import click

from playground.console.options import RunOptions, run_options
from playground.console.training import train_and_show
from playground.console.training_options import (
    DataOptions,
    SnapshotOptions,
    TrainingOptions,
    bytes_of,
    data_options,
    logical_ranks_option,
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
@data_options
@sync_options
@logical_ranks_option()
@snapshot_options
def command(
    run: RunOptions, training: TrainingOptions, data: DataOptions, survival: SnapshotOptions, sync: str,
    sync_every: int, all_reduce: str, bucket_cap_mb: float, logical_ranks: int | None,
) -> None:  # fmt: skip
    train_and_show(
        LESSON, remote("playground.training.loop:train_by_hand"), run, data, training, survival, sync=sync,
        sync_every=sync_every, all_reduce=all_reduce, bucket_cap=bytes_of(bucket_cap_mb), logical_ranks=logical_ranks,
    )  # fmt: skip
