"""The command `ladder`: settings, results, whether the replicas agree, and the text. Does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from playground.console.options import flags, only_with
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, figures, tabulate
from playground.console.text import good, prose
from playground.console.training import DataOptions, announce_data, data_options, over_links
from playground.lessons import LESSONS
from playground.measurement.environment import Environment
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag, like
from playground.runtime.remote import remote
from playground.training.grad_syncs import DDP, GRAD_SYNCS, SPARSE
from playground.training.prepare import PreparedData
from playground.training.results import replicas_verdict
from playground.training.settings import TrainingSettings

LESSON = LESSONS["ladder"]
RUN = LESSON.remote("run", "measure")
BERT = "bert"
IMAGE_MODELS = {
    "net": remote("playground.lessons.sgd.lesson:Net"),
    "resnet18": LESSON.remote("ResNet18", "measure"),
}
"""They have 21,840 and 11,175,370 parameters."""
MODELS = IMAGE_MODELS | {BERT: LESSON.remote("TokenBert", "sparse_embeddings")}
"""The models to train; the last, of 13,457,283 parameters, on token ids drawn by Zipf's law, in
place of images."""
TOKENS = PreparedData(
    name="zipf", folder=Path(), why="as frequent as words are in a text", train=4096, test=0,
    kind="sequences of token ids",
)  # fmt: skip
"""Token ids, which each rank draws for itself."""
OF_BERT = {"steps": 10, "batch_size": 16, "bucket_cap": 2 * 2**20}
"""Defaults for bert, which differ from those of `LadderSettings`."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a training step, in order: medians over the steps, in seconds."""

    forward: float
    backward: float
    """Until the last gradient is ready."""
    exposed: float
    """From then until all gradients are averaged."""
    step: float
    """The optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class Rung(StepParts):
    """One rung, or DistributedDataParallel, on all ranks together; its parts are those of the rank
    that is the last to start averaging."""

    alone: float
    """Seconds that the same averaging takes without a backward to hide behind."""
    hidden: float
    """Share of `alone` that is not exposed, from 0 to 1."""
    messages: int
    """Number of messages per step, on the rank that sends most (where only the rows in use of an
    embedding travel, in the first step)."""
    bytes: int
    """Bytes of these messages."""
    early_bytes: int
    """Bytes of those that leave before the last gradient is ready."""
    difference_to_ddp: float
    """The largest difference of any parameter from DistributedDataParallel's, on any rank."""
    rung: str
    """Its name."""
    p50: float
    """Median seconds of a step, on its slowest rank."""
    loss: float
    """Mean over the last global batch."""
    replicas_max_difference: float
    """The largest difference of any parameter between a rank and rank 0 (BatchNorm's statistics are
    each rank's own)."""
    speed_to_first: float
    """How many times as fast as the first rung."""
    speed_to_ddp: float
    """How many times as fast as DistributedDataParallel."""
    caveat: str
    """Why `hidden` is less than it could be, where the backend keeps DistributedDataParallel from
    hiding messages; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class LadderResult:
    """The measurement of all rungs, the same on every rank."""

    rungs: list[Rung]
    """In order; the last is DistributedDataParallel."""
    parts: list[dict[str, StepParts]]
    """The parts of a step, by rank and by rung's name."""
    environment: Environment


PARTS = tuple(part.name for part in fields(StepParts))
TIMES = ("p50", *PARTS, "alone")
"""Figures of a rung that are shown in milliseconds, in order."""
LEGEND = (
    "  p50: median time of a step, on its slowest rank. Its parts are medians on the rank that is "
    "the last to start "
    "averaging: forward; backward, until the last gradient is ready; exposed, from then until all "
    "gradients are "
    "averaged (in the row parameters, what averaging them takes after the optimizer's step; "
    "shared-step sums in that "
    "step). alone: what the same averaging takes without a backward to hide behind; hidden: the "
    "share of it that is "
    "not exposed. vs. ddp, vs. first: how many times as fast as ddp, and as the first rung.",
    "  With --wide: step, the optimizer's; early, the share of the bytes that "
    "are sent before the last gradient is ready (nothing else can be hidden); messages and bytes "
    "that a rank sends "
    "in a step; the loss of the last batch; distance, the largest difference of any parameter from "
    "ddp's (rounding, "
    "which grows where it decides which of two numbers a ReLU or max_pool lets through).",
)
ON_NO_LINK = ("shared-step", "zero-1", "zero-2", "zero-3")
"""Rungs without an all-reduce, whose messages a simulated link does not delay."""


def candidates(model: str, link: float = 0.0) -> dict[str, str]:
    """The candidates for this model by name, with a summary: every gradient synchronisation, in
    order, with one for embeddings where there are any, then DistributedDataParallel. Over a
    simulated link without those that it would not delay."""
    rungs: dict[str, str] = {}
    for name, spec in GRAD_SYNCS.items():
        if not (link and name in ON_NO_LINK):
            rungs[name] = spec.summary
        if name == "overlapped" and model == BERT:
            rungs[SPARSE] = (
                "overlapped, and of an embedding's gradient only the rows that some rank used"
            )
    return rungs | {DDP: "DistributedDataParallel, which does what overlapped does in C++"}


@dataclass(frozen=True, kw_only=True)
class LadderSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` does not matter: every
    rung is measured. Raises `UsageError` for what cannot be measured."""

    model: str = flag("net", "Model to train.", choices=MODELS)
    steps: int = flag(100, "Number of steps to time on each rung.", least=1)
    bucket_cap: int = like(TrainingSettings, "bucket_cap", 52_428)
    """Bytes after which a bucket of gradients is full, in the rungs and in
    DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class ByModel:
    """Settings whose defaults depend on the model."""

    steps: int | None = like(LadderSettings, "steps", None, shown_default="100, for bert 10")
    batch_size: int | None = like(
        LadderSettings, "batch_size", None, shown_default="128, for bert 16"
    )
    bucket_cap: int | None = like(
        LadderSettings, "bucket_cap", None, shown_default="0.05, for bert 2"
    )


def agreement(rungs: Sequence[Rung], all_reduce: str) -> str:
    """The verdict on the replicas, after the same number of steps on every rung. Raises
    `PlaygroundError` if those of a rung that adds with `all_reduce`, or those of
    DistributedDataParallel, the last, differ though they must not."""
    methods = [*[all_reduce] * (len(rungs) - 1), None]
    differences = [rung.replicas_max_difference for rung in rungs]
    verdicts = map(replicas_verdict, differences, methods)
    return max(zip(differences, verdicts, strict=True))[1]


def result_texts(rungs: Sequence[Rung]) -> Texts:
    """The meaning of the columns, a row per rung, and caveats."""
    times = {part: Column(part, "ms", right=True, wide=part == "step") for part in TIMES}
    sent = figures(
        ("early", "early", "%", ".0f"), ("messages",), ("bytes", "sent", "bytes", ","), wide=True
    )
    ratios = figures(
        ("speed_to_ddp", "vs.\nddp", "", ".2f"), ("speed_to_first", "vs.\nfirst", "", ".2f")
    )
    outcome = figures(("loss", "loss", "", ".4f"), ("distance", "distance\nto ddp"), wide=True)
    columns = (
        {"rung": Column("rung")}
        | times
        | figures(("hidden", "hidden", "%", ".0f", 100))
        | sent
        | ratios
        | outcome
    )
    shown = [
        vars(rung)
        | {name: milliseconds_text(getattr(rung, name)) for name in TIMES}
        | {"early": 100 * rung.early_bytes / max(1, rung.bytes)}
        | {"distance": f"{rung.difference_to_ddp:.1e}" if rung.difference_to_ddp else "0"}
        for rung in rungs
    ]
    caveats = (f"  {rung.rung}: {rung.caveat}." for rung in rungs if rung.caveat)
    return [*LEGEND, tabulate(shown, columns), *caveats]


def milliseconds_text(seconds: float) -> str:
    """With as many digits as mean something."""
    return f"{1000 * seconds:.{1 if seconds >= 0.1 else 2}f}"


def fastest_text(rungs: Sequence[Rung]) -> str:
    """How the fastest rung compares with the first, and with DistributedDataParallel."""
    fastest = min(rungs[:-1], key=lambda rung: rung.p50)
    return (
        f"the fastest rung, {fastest.rung}, is {fastest.speed_to_first:.2f} times as fast as "
        f"{rungs[0].rung} and {fastest.speed_to_ddp:.2f} times as fast as {rungs[-1].rung}"
    )


def hidden_text(rungs: Sequence[Rung]) -> str:
    """How much of their averaging those that send during backward have hidden behind it."""
    early = [f"{rung.rung} {rung.hidden:.0%}" for rung in rungs if rung.early_bytes]
    return f"of the averaging, backward hid here: {', '.join(early) or 'nothing'}"


@LESSON.run_by(
    flags(LadderSettings, "model", "all_reduce", "link"),
    flags(ByModel),
    data_options("dataset"),
    only_with("dataset", model=tuple(IMAGE_MODELS)),
)
def command(session: Session, data: DataOptions, model: str, **chosen: Any) -> None:
    world, is_bert = session.world, model == BERT
    folder = Path() if is_bert else data.folder
    given = {name: value for name, value in chosen.items() if value is not None}
    chosen = OF_BERT | given if is_bert else given
    asked = LadderSettings(folder=folder, model=model, **chosen)
    asked.check_batch(world.size)
    if model == "resnet18" and asked.batch_size < 2 * world.size:
        why = (
            f"resnet18's BatchNorm needs two samples or more on each, so at least {2 * world.size}"
        )
        raise UsageError(f"--batch-size {asked.batch_size} for {world.size} ranks: {why}")
    world.warm_up(RUN)
    links = over_links(session, asked.link)
    work = f"training: {model}, {asked.steps} steps of {asked.batch_size} samples{links}"
    about = Table(
        "rung", Column("what it does", wraps=True), rows=candidates(model, asked.link).items()
    )
    ready = TOKENS if is_bert else None
    prepared, settings = announce_data(session, data, asked, work, "", about, ready=ready)
    result: LadderResult = session.launch(RUN, settings)[0]
    rungs = result.rungs
    verdict = agreement(rungs, settings.all_reduce)
    session.say("", *result_texts(rungs), "")
    shown = LESSON.conclude(
        world.size, fastest=f"{fastest_text(rungs)}{links}", hidden=hidden_text(rungs)
    )
    session.say(prose(f"Shown: {shown}; ", good(verdict), "."))
    recipe = {
        name: getattr(settings, name)
        for name in ("batch_size", "bucket_cap", "all_reduce", "seed", "model")
    }
    measured = {"timed_steps": settings.steps, "rungs": rungs, "environment": result.environment}
    session.print_document({"run": result.parts}, dataset=prepared.summary, **recipe, **measured)
