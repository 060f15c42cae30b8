"""What commands that train do: prepare the data, train, show every epoch, and what came of it."""

from __future__ import annotations

from typing import Any

import click

from playground.console.lesson import Lesson
from playground.console.options import RunOptions
from playground.console.progress import TrainingProgress
from playground.console.session import Session
from playground.console.training_options import DataOptions, TrainingOptions, prepare_data
from playground.runtime.remote import Remote, remote
from playground.training.results import TrainingResult, replicas_verdict
from playground.training.settings import TrainingSettings

RUN_TRAINING = remote("playground.training.runner:run_training")


def train_and_show(
    lesson: Lesson, general: Remote, run: RunOptions, data: DataOptions, training: TrainingOptions, **sync: Any
) -> None:
    """Train as the lesson's own `run` does or, where its loop will not do, as `general` does.

    `sync`: further fields of `TrainingSettings`.
    """
    session = Session(lesson.name, run, default_size=lesson.default_size)
    world = session.world
    asked = TrainingSettings(folder=data.data_dir, limit=data.limit, seed=run.seed, **vars(training), **sync)
    asked.check_batch(world.size)
    function = lesson.remote("run") if asked.is_tutorial else general
    world.warm_up(function, RUN_TRAINING, *(["torchvision.transforms"] if asked.loader == "per-sample" else []))
    prepared = prepare_data(data)
    asked.check_accumulation(prepared.train)
    settings = prepared.settings(asked)
    session.say(f"{lesson.name}: {world}, {prepared}")
    with TrainingProgress(session.say) as progress:
        result: TrainingResult = world.run(RUN_TRAINING, function, settings, on_report=progress)[0]
    best = result.best
    session.say(f"best test accuracy {best.test_accuracy:.2%}, after epoch {best.epoch}")
    if result.diverged:
        click.echo("the loss is not a finite number any more: training diverged, try a smaller --lr", err=True)
    verdict = replicas_verdict(result.replicas_max_difference, settings.all_reduce)
    session.say(f"Shown: {lesson.shown.format(size=world.size)}; {verdict}.")
    session.print_document(
        {"run": [{"loss": loss} for loss in result.epochs[-1].loss_per_rank]},
        dataset=prepared.summary, best=best, epochs=result.epochs,
        replicas_max_difference=result.replicas_max_difference,
    )  # fmt: skip
