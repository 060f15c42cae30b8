"""The command `ddp`: train, or take DDP apart; and the text of what the parts of the lab found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from click.core import ParameterSource

from playground.console.options import (
    ALL,
    Finite,
    RunOptions,
    flag_of,
    pack_options,
    refuse_typed,
    run_options,
    select_names,
    take_names,
    typed_options,
)
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Table, Texts, numbers
from playground.console.text import heading, prose
from playground.console.training import train_and_show
from playground.console.training_options import (
    DataOptions,
    SnapshotOptions,
    data_options,
    logical_ranks_option,
    prepare_data,
    snapshot_options,
    training_options,
)
from playground.lessons import LESSONS
from playground.lessons.ddp.settings import (
    BASELINE,
    HOOKS,
    PARTS,
    AccumulationResult,
    BucketsResult,
    CheckpointResult,
    Difference,
    HookResult,
    LabPart,
    LabSettings,
    RefusedHook,
    SamplerResult,
    UnevenResult,
)
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag, flags_of, like
from playground.runtime.remote import remote
from playground.training.models import MODELS
from playground.training.settings import TrainingSettings


def part_texts(part: LabPart, ranks: Sequence[object]) -> Texts:
    """A part: its name, its summary, and its tables. `ranks`: the results of all ranks."""
    refused = [rank["refused"] for rank in ranks if isinstance(rank, Mapping)]
    show = remote(f"{__name__}:{part.name}_texts")
    texts: Texts = [f"  the backend refuses: {refused[0]}"] if refused else show(ranks)
    return ["", prose(heading(part.name), f": {part.code.summary}"), *texts]


def buckets_texts(ranks: Sequence[BucketsResult]) -> Texts:
    """The buckets of the first backward and of the later ones, for each cap; then times and memory."""
    order, cap_column = ranks[0].order, ("bucket cap", "MiB")
    columns = numbers(cap_column, "backward", "bucket", ("size", "bytes"), "gradients\nready")
    buckets = Table(*columns, Column("parameters", wraps=True))
    times = Table(*numbers(cap_column, "buckets", ("time\nper step", "ms")))
    for cap in ranks[0].caps:
        size = f"{cap.bucket_cap_mb:g}"
        for when, sent in (("1", cap.first), (f"{cap.rebuilt_before} …", cap.rebuilt)):
            for each in sent:
                cells = str(each.bucket), f"{each.bytes:,}", f"{each.ready} of {len(order)}"
                buckets.add(size, when, *cells, list_names(each.parameters))
        times.add(size, str(len(cap.rebuilt)), f"{1000 * cap.seconds:.2f}")
    held = ("gradients", "bytes"), ("outside of\nbuckets", "bytes")
    rows = [(str(row.gradient_as_bucket_view), f"{row.gradients:,}", f"{row.outside:,}") for row in ranks[0].memory]
    return [
        f"  Gradients become ready in the order {list_names(order, 10)}.",
        "  The buckets, the same on all ranks; gradients ready: when the bucket is sent.",
        buckets,
        "  What a step takes, and the memory that gradients take:",
        times,
        Table("gradient_as_bucket_view", *numbers(*held), rows=rows),
    ]


def hooks_texts(ranks: Sequence[Sequence[HookResult | RefusedHook]]) -> Texts:
    """Bytes that each hook sends, and the errors it brings: the largest, and of the norm."""
    of_what = "gradient", "parameters"
    errors = [numbers(f"{of}\n{kind}. error", wide=kind == "max")[0] for of in of_what for kind in ("max", "rel")]
    table = Table("hook", "sends", *numbers("messages", ("sent", "bytes")), *errors, *numbers("loss"))
    refused = []
    for result in ranks[0]:
        if isinstance(result, RefusedHook):
            refused.append(f"  {result.hook} is refused here: {result.refused}")
            continue
        figures = [*difference_cells(result.gradient), *difference_cells(result.parameters), f"{result.loss:.6f}"]
        table.add(result.hook, ", ".join(result.types), str(result.messages), f"{result.bytes:,}", *figures)
    about = "  messages, sent: what a rank passes to all_reduce in a step; rel. error: norm of the error / norm"
    return [about, table, *refused]


def accumulation_texts(ranks: Sequence[Sequence[AccumulationResult]]) -> Texts:
    """Messages of each way, and the distance of its gradients from those of one batch."""
    rows = [(each.way, str(each.batches), str(each.messages), *difference_cells(each.difference)) for each in ranks[0]]
    about = "  errors: of the gradients, compared with those of one large batch"
    return [about, Table("way", *numbers("batches", "messages", "max. error", "rel. error"), rows=rows)]


def uneven_inputs_texts(ranks: Sequence[UnevenResult]) -> Texts:
    """Batches, steps and messages of each rank, with Join and with its exception."""
    joined = Table(RANK_COLUMN, *numbers("batches", "steps", "all-reduces", "difference\nfrom rank 0"))
    raising = Table(RANK_COLUMN, *numbers("steps"), Column("error", wraps=True))
    for rank, result in enumerate(ranks):
        joined.add(str(rank), *map(str, (result.batches, result.steps, result.messages, result.difference)))
        end = result.without_joining
        raising.add(str(rank), str(end.steps), end.says or "none: no rank had to wait")
    return [
        "  Within Join (difference from rank 0: the largest of any parameter, at the end):",
        joined,
        "  With throw_on_early_termination=True:",
        raising,
    ]


def checkpoint_texts(ranks: Sequence[CheckpointResult]) -> Texts:
    """The bytes that each rank wrote and read, then the end of training that resumed from them."""
    files = [(str(rank), f"{each.written:,}", f"{each.read:,}", each.device) for rank, each in enumerate(ranks)]
    ends, steps = [(each.loaded, *difference_cells(each.difference)) for each in ranks[0].resumed], ranks[0].steps
    return [
        Table(RANK_COLUMN, *numbers(("written", "bytes"), ("read", "bytes")), "onto", rows=files),
        f"  errors: of the parameters, after {steps} steps, the checkpoint, and {steps} steps more, compared with "
        f"{2 * steps} steps on end",
        Table("loaded", *numbers("max. error", "rel. error"), rows=ends),
    ]


def sampler_texts(ranks: Sequence[Sequence[SamplerResult]]) -> Texts:
    """One column per rank: the positions of its samples, in order."""
    names = (*(f"rank {rank}" for rank in range(len(ranks))), "more than\nonce", "left out")
    table = Table("sampler", *(Column(name, wraps=True) for name in names))
    for number, result in enumerate(ranks[0]):
        mine = [list_positions(theirs[number].mine) for theirs in ranks]
        table.add(result.way, *mine, list_positions(result.doubled), list_positions(result.left_out))
    return ["  The positions of each rank's samples, in order:", table]


def difference_cells(difference: Difference) -> list[str]:
    return [f"{difference.max:.1e}", f"{difference.relative:.1e}"]


def list_positions(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def list_names(names: Sequence[str], most: int = 4) -> str:
    """The names or, of more than `most`, the first and the last, and how many there are."""
    return " ".join(names) if len(names) <= most else f"{names[0]} … {names[-1]} ({len(names)})"


LESSON = LESSONS["ddp"]
TRAIN = remote("playground.training.loop:train_with_ddp")
RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")
ABOUT_HOOKS = "; ".join(f"{hook.name}: {hook.summary}" for hook in HOOKS.values())
ACCUMULATED = 4
"""The lab's default of --accumulate."""
FOR_TRAINING = ("snapshots", "restarts", "epochs", "loader", "loader_workers")
"""Options that the lab does not take."""
cap_type = Finite(0, 1e6, min_open=True)


def read_caps(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Numbers with commas between them, each once."""
    words = dict.fromkeys(text.split(",")) if text is not None else ()
    return tuple(cap_type.convert(word.strip(), param, ctx) for word in words)


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """The options of the lab. If every value is empty, the lab is not asked for."""

    lab: bool = flag(False, "Take DDP apart instead of training. Implied by the options below.")
    only: tuple[str, ...] = flag((), "Run only this part; may be repeated.", choices=PARTS, click={"multiple": True})
    model: str | None = like(LabSettings, "model", None, click={"show_default": LabSettings.model})
    bucket_caps: tuple[float, ...] = flag(
        (),
        "Bucket sizes to compare; the other parts use the last one.",
        name="--bucket-cap-mb",
        metavar="MB,…",
        click={"callback": read_caps, "type": str, "show_default": "by model"},
    )
    static_graph: bool = like(LabSettings, "static_graph")
    gradient_as_bucket_view: bool = like(LabSettings, "gradient_as_bucket_view")
    comm_hooks: tuple[str, ...] = flag(
        (),
        f"Hooks to compare in the part hooks ({ABOUT_HOOKS}), by name: {', '.join(HOOKS)} or {ALL}.",
        name="--comm-hook",
        click=take_names(HOOKS, (ALL,)),
    )
    steps: int | None = like(LabSettings, "steps", None, click={"show_default": str(LabSettings.steps)})

    def settings(self, training: TrainingSettings) -> LabSettings:
        """The lab that is asked for, with that training."""
        words = self.comm_hooks or (ALL,)
        return LabSettings(
            training=training,
            parts=select_names(PARTS, self.only or (ALL,)),
            caps=self.bucket_caps,
            hooks=select_names(HOOKS, (BASELINE, *words)),
            required=tuple(name for name in words if name in HOOKS),
            **{name: value for name in flags_of(LabSettings) if (value := getattr(self, name))},
        )


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@training_options
@data_options
@logical_ranks_option(hidden=True)
@snapshot_options
@pack_options("asked", LabOptions)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: RunOptions,
    data: DataOptions,
    survival: SnapshotOptions,
    asked: LabOptions,
    logical_ranks: int | None,
    **training: Any,
) -> None:
    TrainingSettings(folder=data.folder, logical_ranks=logical_ranks).check_for_ddp()
    if not any(vars(asked).values()):
        train_and_show(LESSON, TRAIN, run, data, survival, **training)
        return
    check_given(ctx, select_names(PARTS, asked.only or (ALL,)))
    if ctx.get_parameter_source("accumulate") is ParameterSource.DEFAULT:
        training["accumulate"] = ACCUMULATED
    settings = TrainingSettings(folder=data.folder, limit=data.limit, seed=run.seed, **training)
    run_and_show_lab(run, data, asked.settings(settings))


def check_given(ctx: click.Context, parts: Sequence[str]) -> None:
    """Raise `UsageError` for an option that changes nothing in what is asked for."""
    refuse_typed(ctx, FOR_TRAINING, "is for training, the lab does without: leave it out")
    for name in typed_options(ctx):
        meant = [part.name for part in PARTS.values() if name in part.options]
        if meant and not set(meant) & set(parts):
            nothing = f"changes nothing in {' and '.join(parts)}"
            raise UsageError(f"{flag_of(ctx, name)} {nothing}: it is for {', '.join(meant)}")


def run_and_show_lab(run: RunOptions, data: DataOptions, settings: LabSettings) -> None:
    """Run the parts of the lab and show the results."""
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    world = session.world
    MODELS[settings.model].check_batch(settings.training.batch_size, world.size)
    parts = [PARTS[name] for name in settings.parts]
    hooks = [HOOKS[name].code for name in settings.hooks] if "hooks" in settings.parts else []
    world.warm_up(RUN_LAB, *(part.code for part in parts), *hooks, *MODELS[settings.model].preload)
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
