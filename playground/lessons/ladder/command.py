"""The command `ladder`: every rung and DistributedDataParallel, measured side by side."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.dependent_options import only_with
from playground.console.options import RunOptions, options, plot_option, run_options
from playground.console.session import Session
from playground.console.text import good, prose
from playground.console.training_options import (
    DataOptions,
    PreparedData,
    all_reduce_option,
    bucket_cap_option,
    bytes_of,
    data_options,
    prepare_data,
)
from playground.lessons import LESSONS
from playground.lessons.ladder import report
from playground.lessons.ladder.results import LadderResult, agreement
from playground.lessons.ladder.settings import LadderSettings, candidates
from playground.measurement import environment
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.runtime.remote import remote
from playground.training.models import IMAGE_MODELS, MODELS, TOKEN_SEQUENCES

LESSON = LESSONS["ladder"]
RUN = remote("playground.lessons.ladder.lesson:run")
COPIES = 6
"""Of a model in a rank's memory, for each candidate: parameters, gradients, momentum, messages (measured: 34 for 6)."""


def by_model(field: str) -> str:
    """The models' defaults, as --help shows them."""
    return ", ".join(f"{getattr(spec, field):g} for {name}" for name, spec in MODELS.items())


class TokenData(PreparedData):
    """Token ids, which each rank draws for itself."""

    def __str__(self) -> str:
        return f"{self.name} ({self.train:,} sequences of token ids; {self.why})"


TOKENS = TokenData(
    folder=Path(), name="zipf", limit=None, train=TOKEN_SEQUENCES, test=0, why="as frequent as words are in a text"
)
ladder_options = options(
    click.option("--model", type=click.Choice(tuple(MODELS)), default="net", show_default=True, help="Model to train."),
    click.option(
        "--steps", type=click.IntRange(1), show_default=by_model("steps"), help="Number of steps to time on each rung."
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        show_default=by_model("batch_size"),
        help="Global batch size: samples per step, over all ranks.",
    ),
    bucket_cap_option(None, by_model("bucket_cap_mb")),
    all_reduce_option,
    data_options,
    plot_option("a bar for each rung"),
    only_with("dataset", "data_dir", "mirror", "limit", model=tuple(IMAGE_MODELS)),
)


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@ladder_options
def command(
    run: RunOptions, data: DataOptions, model: str, steps: int | None, batch_size: int | None,
    bucket_cap_mb: float | None, all_reduce: str, plot: Path | None,
) -> None:  # fmt: skip
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world, spec = session.world, MODELS[model]
    asked = LadderSettings(
        folder=Path() if spec.reads_tokens else data.folder, limit=data.limit, seed=run.seed, model=model,
        steps=steps or spec.steps, batch_size=batch_size or spec.batch_size,
        bucket_cap=bytes_of(bucket_cap_mb or spec.bucket_cap_mb),
        all_reduce=all_reduce,
    )  # fmt: skip
    asked.check_batch(world.size)
    check_memory(world, model)
    if plot:
        plots.check(plot)
    world.warm_up(RUN, *spec.preload)
    with session.bar() as bar:
        prepared = TOKENS if spec.reads_tokens else prepare_data(data, bar)
        asked.check_samples(prepared.train)
        settings = prepared.settings(asked)
        work = f"training: {model}, {settings.steps} steps of {settings.batch_size} samples"
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", work, "", report.candidates_table(model))
        bar.show(f"starting {world.size} ranks")
        result: LadderResult = world.run(RUN, settings, on_report=bar)[0]
    verdict = agreement(result.rungs, all_reduce)
    session.say("", *report.result_texts(result.rungs), "")
    session.say(prose(f"Shown: {LESSON.shown}; {report.fastest_text(result.rungs)}; ", good(verdict), "."))
    if plot and world.is_main:
        report.plot(result.rungs, f"{model}, {world}", plot)
    session.print_document(
        {"run": result.parts}, batch_size=settings.batch_size, bucket_cap=settings.bucket_cap,
        all_reduce=settings.all_reduce, seed=settings.seed, dataset=prepared.summary, model=settings.model,
        timed_steps=settings.steps, rungs=result.rungs, environment=result.environment,
    )  # fmt: skip


def check_memory(world: World, model: str) -> None:
    """Raise `UsageError` for more replicas of a model than this host's memory has room for."""
    replicas = len(candidates(model))
    needed = world.local_size * replicas * COPIES * 4 * MODELS[model].parameters
    available = environment.memory("MemAvailable")
    if world.device == "cpu" and needed > available:
        raise UsageError(
            f"--model {model}: {world.local_size} ranks need about {needed:,} bytes of memory for {replicas} "
            f"replicas each and {available:,} are free: use fewer ranks or --model net"
        )
