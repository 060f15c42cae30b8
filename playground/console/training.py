"""What commands that train do: prepare the data, train, show every epoch, and what came of it."""

from __future__ import annotations

from typing import Any

import click

from playground.console.epochs import EpochPrinter
from playground.console.failures import NoticePrinter, echo_restarts
from playground.console.lesson import Lesson
from playground.console.options import RunOptions
from playground.console.preemption import resumable_if_preempted
from playground.console.session import Session
from playground.console.snapshot_options import SnapshotOptions
from playground.console.text import good, prose
from playground.console.training_options import (
    DataOptions,
    PreparedData,
    TrainingOptions,
    describe_logical_ranks,
    prepare_data,
)
from playground.console.unfinished import FinishedEpochs
from playground.runtime.rank import Event
from playground.runtime.remote import Remote, remote
from playground.training.grad_syncs import RUNGS
from playground.training.results import TrainingResult, replicas_verdict
from playground.training.settings import TrainingSettings

RUN_TRAINING = remote("playground.training.runner:run_training")
LOADER_MODULES = {
    "per-sample": ("torchvision.transforms",), "paths": ("torchvision.transforms", "PIL.PngImagePlugin"),
}  # fmt: skip
"""What ranks import for a way to fetch samples: the fork server does, once."""


def train_and_show(
    lesson: Lesson, general: Remote, run: RunOptions, data: DataOptions, training: TrainingOptions,
    survival: SnapshotOptions, **sync: Any,
) -> None:  # fmt: skip
    """Train as the lesson's own `run` does or, where its loop will not do, as `general` does.

    `sync`: further fields of `TrainingSettings`. Training whose ranks fail is started anew, as often as `survival`
    allows, and goes on from its snapshots, if it takes any: later, too, if it is asked to end for now. Training that
    diverges is a result like any other, with a word about it on stderr. Training that is stopped leaves its document,
    with the epochs it had finished, and its exit code.
    """
    session = Session(lesson.name, run, default_size=lesson.default_size, restarts=survival.restarts)
    world = session.world
    asked = TrainingSettings(
        folder=data.folder, limit=data.limit, seed=run.seed, **vars(training), **sync, snapshots=survival.settings
    )
    asked.check_batch(world.size)
    function = lesson.remote("run") if asked.is_tutorial else general
    world.warm_up(function, RUN_TRAINING, *LOADER_MODULES.get(asked.loader, ()))
    with session.bar() as bar:
        prepared = prepare_data(data, bar, as_files=asked.loader == "paths")
        asked.check_accumulation(prepared.train)
        settings = prepared.settings(asked)
        session.say(f"{lesson.name}: {world}", f"data: {prepared}", *describe_logical_ranks(settings, world.size))
        finished, printer, notices = FinishedEpochs(), EpochPrinter(session, bar), NoticePrinter()

        def on_report(rank: int, event: Event) -> None:
            finished.keep(rank, event)
            printer(rank, event)
            notices(rank, event)

        stopped = finished.printed_if_stopped(session, dataset=prepared.summary)
        with stopped, resumable_if_preempted(session, survival, survival.snapshots):
            bar.show(f"starting {world.size} ranks")
            [result, *_] = world.run(
                RUN_TRAINING, function, settings, on_report=on_report,
                on_restart=echo_restarts(survival.restarts), grace=survival.grace_of_ranks,
            )  # fmt: skip
    show_result(session, lesson, settings, prepared, result)


def show_result(
    session: Session, lesson: Lesson, settings: TrainingSettings, data: PreparedData, result: TrainingResult
) -> None:
    """Show what came of training with `settings` on `data`. Raises `PlaygroundError` if replicas differ that must
    not."""
    best = result.best
    session.say("", f"Best test accuracy: {best.test_accuracy:.2%}, after epoch {best.epoch}.")
    if result.diverged:
        click.echo("training diverged: the loss is no longer a finite number; try a smaller --lr", err=True)
    session.print_document(
        {"run": [{"loss": loss} for loss in result.epochs[-1].loss_per_rank]},
        dataset=data.summary, best=best, epochs=result.epochs,
        replicas_max_difference=result.replicas_max_difference, complete=True,
    )  # fmt: skip
    verdict = replicas_verdict(result.replicas_max_difference, settings.all_reduce, result.replicas_differ_in)
    averaged = "gradients" if settings.sync in RUNGS else "parameters"
    session.say(prose(f"Shown: {lesson.conclude(session.world.size, averaged=averaged)}; ", good(verdict), "."))
