"""The command `ddp`: training with DistributedDataParallel, or the lab that takes it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
from click.core import ParameterSource

from playground.console.dependent_options import flag_of, typed_options
from playground.console.names import ALL, names_option, select_names
from playground.console.options import Finite, RunOptions, pack_options, run_options
from playground.console.session import Session
from playground.console.snapshot_options import SnapshotOptions, snapshot_options
from playground.console.training import train_and_show
from playground.console.training_options import (
    DataOptions,
    TrainingOptions,
    data_options,
    logical_ranks_option,
    prepare_data,
    training_options,
)
from playground.lessons import LESSONS
from playground.lessons.ddp.hooks_table import BASELINE, HOOKS
from playground.lessons.ddp.parts import PARTS
from playground.lessons.ddp.report import part_texts
from playground.lessons.ddp.settings import LabSettings
from playground.runtime.errors import UsageError
from playground.runtime.remote import remote
from playground.training.models import IMAGE_MODELS
from playground.training.settings import TrainingSettings

LESSON = LESSONS["ddp"]
TRAIN = remote("playground.training.loop:train_with_ddp")
RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")
MODEL, STEPS, ACCUMULATED = "net", 5, 4
"""The lab's defaults."""
FOR_TRAINING = ("snapshots", "restarts", "epochs", "loader", "loader_workers")
"""Options that the lab does without."""
cap_type = Finite(0, 1e6, min_open=True)


def read_caps(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Numbers with commas between them, each once."""
    words = dict.fromkeys(text.split(",")) if text is not None else ()
    return tuple(cap_type.convert(word.strip(), param, ctx) for word in words)


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """What the lab is asked for. Where every value is empty, nobody asks for the lab."""

    lab: bool
    only: tuple[str, ...]
    model: str | None
    bucket_caps: tuple[float, ...]
    static_graph: bool
    gradient_as_bucket_view: bool
    comm_hooks: tuple[str, ...]
    steps: int | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts to run, in the order of the lab."""
        return tuple(name for name in PARTS if name in (self.only or PARTS))

    def settings(self, training: TrainingSettings) -> LabSettings:
        """The lab that is asked for, with that training."""
        words = self.comm_hooks or (ALL,)
        return LabSettings(
            training=training, parts=self.parts, model=self.model or MODEL, caps=self.bucket_caps,
            static_graph=self.static_graph, gradient_as_bucket_view=self.gradient_as_bucket_view,
            hooks=select_names(tuple(HOOKS), (BASELINE, *words)),
            required=tuple(name for name in words if name in HOOKS), steps=self.steps or STEPS,
        )  # fmt: skip


lab_options = pack_options(
    "asked", LabOptions,
    click.option("--lab", is_flag=True, help="Take DDP apart instead of training. Implied by the options below."),
    click.option("--only", type=click.Choice(tuple(PARTS)), multiple=True, help="Run only this part; may be repeated."),
    click.option("--model", type=click.Choice(tuple(IMAGE_MODELS)), show_default=MODEL, help="Model of the lab."),
    click.option(
        "--bucket-cap-mb", "bucket_caps", callback=read_caps, metavar="MB,…", show_default="by model",
        help="Bucket sizes to compare; the other parts use the last one.",
    ),
    click.option("--static-graph", is_flag=True, help="In the part buckets: tell DDP that the graph never changes."),
    click.option("--gradient-as-bucket-view", is_flag=True, help="In the part buckets: let gradients be views."),
    names_option(
        "--comm-hook", "comm_hooks", known=tuple(HOOKS), default=(ALL,),
        help=f"Hooks to compare in the part hooks "
        f"({'; '.join(f'{hook.name}: {hook.summary}' for hook in HOOKS.values())}), by name",
    ),
    click.option(
        "--steps", type=click.IntRange(1), show_default=str(STEPS),
        help="Number of steps: timed in the part buckets, trained with each hook in the part hooks, before and after "
        "the part checkpoint.",
    ),
)  # fmt: skip
"""Gives a command the argument `asked`: its `LabOptions`."""


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@training_options
@data_options
@logical_ranks_option(hidden=True)
@snapshot_options
@lab_options
@click.pass_context
def command(
    ctx: click.Context, /, run: RunOptions, training: TrainingOptions, data: DataOptions, survival: SnapshotOptions,
    asked: LabOptions, logical_ranks: int | None,
) -> None:  # fmt: skip
    TrainingSettings(folder=data.folder, logical_ranks=logical_ranks).check_for_ddp()
    if not any(vars(asked).values()):
        train_and_show(LESSON, TRAIN, run, data, training, survival)
        return
    check_given(ctx, asked.parts)
    if ctx.get_parameter_source("accumulate") is ParameterSource.DEFAULT:
        training = replace(training, accumulate=ACCUMULATED)
    run_and_show_lab(run, data, training, asked)


def check_given(ctx: click.Context, parts: Sequence[str]) -> None:
    """Raise `UsageError` for an option that changes nothing in what is asked for."""
    for name in typed_options(ctx):
        option = flag_of(ctx, name)
        if name in FOR_TRAINING:
            raise UsageError(f"{option} is for training, the lab does without: leave it out")
        meant = [part.name for part in PARTS.values() if name in part.options]
        if meant and not set(meant) & set(parts):
            raise UsageError(f"{option} changes nothing in {' and '.join(parts)}: it is for {', '.join(meant)}")


def run_and_show_lab(run: RunOptions, data: DataOptions, training: TrainingOptions, asked: LabOptions) -> None:
    """Run the parts of the lab and show what each found."""
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    settings = asked.settings(TrainingSettings(folder=data.folder, limit=data.limit, seed=run.seed, **vars(training)))
    settings.check_batch(world.size)
    parts = [PARTS[name] for name in settings.parts]
    hooks = [HOOKS[name].code for name in settings.hooks] if "hooks" in settings.parts else []
    world.warm_up(RUN_LAB, *(part.code for part in parts), *hooks, *IMAGE_MODELS[settings.model].preload)
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        settings.training.check_samples(prepared.train)
        settings = replace(settings, training=prepared.settings(settings.training))
        session.say(f"{LESSON.name}: {world}", f"data: {prepared}", f"lab: on the model {settings.model}")
        bar.show(f"starting {world.size} ranks")
        by_rank = world.run(RUN_LAB, settings, on_report=bar)
    by_part = dict(zip(settings.parts, zip(*by_rank, strict=True), strict=True))
    for part in parts:
        session.say(*part_texts(part, by_part[part.name]))
    session.say("", f"Shown: {', '.join(part.shown for part in parts)}.")
    session.print_document(by_part, dataset=prepared.summary, lab=settings.document)
