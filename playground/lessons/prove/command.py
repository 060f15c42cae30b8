"""The command `prove`: N ranks against one process, and what breaks it."""

from __future__ import annotations

import click

from playground.console.options import Finite, RunOptions, run_options
from playground.console.session import Session
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import (
    DataOptions,
    all_reduce_option,
    bucket_cap_option,
    bytes_of,
    data_options,
    prepare_data,
)
from playground.lessons import LESSONS
from playground.lessons.prove.report import ReportPrinter, breaks_summary, proof_summary, shares_text
from playground.lessons.prove.results import ProveResult
from playground.lessons.prove.settings import BUCKET_CAP_MB, ProveSettings
from playground.lessons.prove.verdict import check
from playground.runtime.remote import outline
from playground.training.partition import share

LESSON = LESSONS["prove"]
EXPERIMENT = LESSON.remote("run", "experiment")


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@click.option(
    "--batch-size", type=click.IntRange(1), default=ProveSettings.batch_size, show_default=True,
    help="Global batch size: samples per step, over all ranks.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1), default=ProveSettings.steps, show_default=True,
    help="Number of training steps; after each, everything is compared.",
)  # fmt: skip
@click.option("--lr", type=Finite(0, min_open=True), default=ProveSettings.lr, show_default=True, help="Learning rate.")
@click.option("--momentum", type=Finite(0), default=ProveSettings.momentum, show_default=True, help="Momentum of SGD.")
@all_reduce_option
@bucket_cap_option(BUCKET_CAP_MB)
@data_options
def command(
    run: RunOptions, data: DataOptions, batch_size: int, steps: int, lr: float, momentum: float, all_reduce: str,
    bucket_cap_mb: float,
) -> None:  # fmt: skip
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    asked = ProveSettings(
        folder=data.folder, limit=data.limit, seed=run.seed, steps=steps, batch_size=batch_size, lr=lr,
        momentum=momentum, all_reduce=all_reduce, bucket_cap=bytes_of(bucket_cap_mb),
    )  # fmt: skip
    asked.check_batch(world.size)
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    summaries = outline(LESSON.module("failure_modes")).docstrings | {"equal": LESSON.remote("compare").summary}
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        asked.check_samples(prepared.train)
        work = f"training: {steps} steps, batches of {shares_text(batch_size, world.size)}, without dropout"
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", work)
        bar.show(f"starting {world.size} ranks")
        printer = ReportPrinter(session.say, bar, summaries)
        settings = prepared.settings(asked)
        result: ProveResult = world.run(RUN_TRAINING, EXPERIMENT, settings, on_report=printer)[0]
    session.print_document(
        {"equal": [{"samples": share(batch_size, rank, world.size)} for rank in range(world.size)]},
        dataset=prepared.summary, recipe=asked.recipe, proof=result.proof, breaks=result.breaks,
    )  # fmt: skip
    check(result)
    shown = good(LESSON.conclude(world.size))
    session.say(
        "", prose("Shown: ", shown, f" ({proof_summary(result.proof)}); {breaks_summary(result.breaks)}.")
    )  # fmt: skip
