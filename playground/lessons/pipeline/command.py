"""The command `pipeline`: a model in stages, by three schedules."""

from __future__ import annotations

from dataclasses import replace

import click

from playground.console import terminal
from playground.console.options import RunOptions, options, run_options
from playground.console.session import Session
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.lessons.pipeline import report
from playground.lessons.pipeline.results import StageRun, collect
from playground.lessons.pipeline.schedules import SCHEDULES
from playground.lessons.pipeline.settings import PipelineSettings
from playground.runtime import host

LESSON = LESSONS["pipeline"]
EXPERIMENT = LESSON.remote("run", "experiment")
ALL = "all"

pipeline_options = options(
    click.option(
        "--schedule", type=click.Choice([*SCHEDULES, ALL]), default=ALL, show_default=True,
        help="The order in which stages work.",
    ),
    click.option(
        "--microbatches", type=click.IntRange(1), default=PipelineSettings.microbatches, show_default=True, metavar="M",
        help="Number of microbatches that each replica's part of a batch is cut into.",
    ),
    click.option(
        "--data-parallel", type=click.IntRange(1), default=PipelineSettings.data_parallel, show_default=True,
        metavar="D", help="Number of replicas of the pipeline: -n is stages x D.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(1), default=PipelineSettings.batch_size, show_default=True,
        help="Global batch size: samples per step, over all replicas.",
    ),
    click.option(
        "--steps", type=click.IntRange(1), default=PipelineSettings.steps, show_default=True,
        help="Number of training steps that are timed, with each schedule.",
    ),
    data_options,
)  # fmt: skip


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@pipeline_options
def command(
    run: RunOptions, data: DataOptions, schedule: str, microbatches: int, data_parallel: int, batch_size: int,
    steps: int,
) -> None:  # fmt: skip
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    asked = PipelineSettings(
        size=world.size, folder=data.folder, limit=data.limit, seed=run.seed, microbatches=microbatches,
        data_parallel=data_parallel, batch_size=batch_size, steps=steps,
        schedules=tuple(SCHEDULES) if schedule == ALL else (schedule,),
    )  # fmt: skip
    world.warm_up(RUN_TRAINING, EXPERIMENT)
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        asked.check_samples(prepared.train)
        settings = replace(asked, folder=prepared.folder, dataset=prepared.name)
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", report.model_text(settings))
        if (crowd := world.local_size) > host.cores() and world.device == "cpu":
            session.say(report.crowded_text(crowd, host.cores()))
        bar.show(f"starting {world.size} ranks")
        by_rank: list[list[StageRun]] = world.run(RUN_TRAINING, EXPERIMENT, settings, on_report=bar)
    runs = collect(by_rank, settings.schedules, settings.stages, microbatches)
    for each in runs:
        session.say("", *report.timeline_texts(each, each.spec.code.summary, terminal.width()))
    session.say("", *report.held_texts(runs), "", *report.cost_texts(runs))
    session.print_document(
        {each.name: each.ranks for each in runs}, dataset=prepared.summary, stages=settings.stages,
        microbatches=microbatches, data_parallel=data_parallel, schedules={each.name: each.summary for each in runs},
    )  # fmt: skip
    for each in runs:
        each.check()
    shown = good(LESSON.conclude(world.size))
    session.say("", prose("Shown: ", shown, f"; {report.same_losses_text(runs)}."))
