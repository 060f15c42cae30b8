"""The command `bench steps`: time a training step with each gradient synchronisation. Does not
import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.algorithms import ALGORITHMS
from playground.base.errors import PlaygroundError, UsageError
from playground.base.flags import flag
from playground.base.remote import remote
from playground.training import prepare
from playground.training.prepare import PreparedData, Settings
from playground.training.step_results import PARTS, StepResult, Variant
from playground.training.step_settings import (
    BERT,
    IMAGE_MODELS,
    OF_BERT,
    TOKENS,
    ByModel,
    StepSettings,
    candidates,
)
from playground.ui.options import flags, refuse_without
from playground.ui.run_options import COMMON
from playground.ui.session import Session, session_command
from playground.ui.tables import Column, Table, Text, Texts, named_numbers, tabulate
from playground.ui.text import good, prose

ROUNDING = 1e-4
"""How far replicas may drift apart where each adds in an order of its own (three of them, ten
epochs: 1.2e-7)."""
MEASURE = remote("playground.training.step_times:run")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of the data."""

    dataset: str = flag(
        "auto",
        "auto: MNIST if it is here or can be downloaded, else generated digits.",
        choices=prepare.DATASETS,
    )


OPTIONS: tuple[Callable[[Any], Any], ...] = (
    flags(StepSettings, "model", "all_reduce", "link"),
    flags(ByModel),
    flags(DataOptions),
    refuse_without("dataset", "model", tuple(IMAGE_MODELS)),
)
"""Their values are arguments of `measure_steps`."""
TIMES = ("p50", *PARTS, "alone")
"""Figures of a variant that are shown in milliseconds, in order."""
LEGEND = (
    "  p50: median time of a step, on its slowest rank. Its parts are medians on the rank that "
    "is the last to start averaging: forward; backward, until the last gradient is ready; "
    "exposed, from then until all gradients are averaged (in the row parameters, what "
    "averaging them takes after the optimizer's step; shared-step sums in that step). alone: "
    "what the same averaging takes without a backward to hide behind; hidden: the share of it "
    "that is not exposed. vs. ddp, vs. first: how many times as fast as ddp, and as the "
    "first.",
    "  With --wide: step, the optimizer's; early, the share of the bytes that are sent before "
    "the last gradient is ready (nothing else can be hidden); messages and bytes that a rank "
    "sends in a step; the loss of the last batch; distance, the largest difference of any "
    "parameter from ddp's (rounding, which grows where it decides which of two numbers a ReLU "
    "or max_pool lets through).",
)


def replicas_verdict(difference: float, all_reduce: str | None = None, name: str = "") -> str:
    """Describe the largest difference between replicas, which is in the parameter or buffer of this
    `name`. Raises `PlaygroundError` if it must not be there."""
    if difference == 0:
        return "all replicas are bit-identical (largest difference 0.0)"
    if all_reduce in ALGORITHMS and not ALGORITHMS[all_reduce].same_bits and difference < ROUNDING:
        return (
            f"the replicas differ by up to {difference:.1e}: round this ring each rank adds in an "
            "order of its own, and rounding depends on the order"
        )
    where = f", in {name}" if name else ""
    raise PlaygroundError(
        f"the replicas differ by up to {difference:.2g}{where}: they must not at all"
    )


def agreement(variants: Sequence[Variant], all_reduce: str) -> str:
    """The verdict on the replicas, after the same number of steps on every variant. Raises
    `PlaygroundError` if those of a variant that adds with `all_reduce`, or those of
    DistributedDataParallel, the last, differ though they must not."""
    methods = [*[all_reduce] * (len(variants) - 1), None]
    differences = [variant.replicas_max_difference for variant in variants]
    verdicts = [
        replicas_verdict(difference, method)
        for difference, method in zip(differences, methods, strict=True)
    ]
    return max(zip(differences, verdicts, strict=True))[1]


def result_texts(variants: Sequence[Variant]) -> Texts:
    """The meaning of the columns, a row per variant, and caveats."""
    times = {part: Column(part, "ms", right=True, wide=part == "step") for part in TIMES}
    sent = named_numbers(
        ("early", "early", "%", ".0f"), ("messages",), ("bytes", "sent", "bytes", ","), wide=True
    )
    ratios = named_numbers(
        ("speed_to_ddp", "vs.\nddp", "", ".2f"), ("speed_to_first", "vs.\nfirst", "", ".2f")
    )
    outcome = named_numbers(
        ("loss", "loss", "", ".4f"), ("distance", "distance\nto ddp"), wide=True
    )
    columns = (
        {"name": Column("variant")}
        | times
        | named_numbers(("hidden", "hidden", "%", ".0f", 100))
        | sent
        | ratios
        | outcome
    )
    shown = [
        vars(variant)
        | {name: milliseconds_text(getattr(variant, name)) for name in TIMES}
        | {"early": 100 * variant.early_bytes / max(1, variant.bytes)}
        | {"distance": f"{variant.difference_to_ddp:.1e}" if variant.difference_to_ddp else "0"}
        for variant in variants
    ]
    caveats = (f"  {variant.name}: {variant.caveat}." for variant in variants if variant.caveat)
    return [*LEGEND, tabulate(shown, columns), *caveats]


def milliseconds_text(seconds: float) -> str:
    """With as many digits as mean something."""
    return f"{1000 * seconds:.{1 if seconds >= 0.1 else 2}f}"


def fastest_text(variants: Sequence[Variant]) -> str:
    """How the fastest variant compares with the first, and with DistributedDataParallel."""
    fastest = min(variants[:-1], key=lambda variant: variant.p50)
    return (
        f"the fastest, {fastest.name}, is {fastest.speed_to_first:.2f} times as fast as "
        f"{variants[0].name} and {fastest.speed_to_ddp:.2f} times as fast as {variants[-1].name}"
    )


def hidden_text(variants: Sequence[Variant]) -> str:
    """How much of their averaging those that send during backward have hidden behind it."""
    early = [f"{variant.name} {variant.hidden:.0%}" for variant in variants if variant.early_bytes]
    return f"of the averaging, backward hid here: {', '.join(early) or 'nothing'}"


@dataclass(frozen=True)
class StepTimes:
    """A measurement, and what was measured."""

    settings: StepSettings
    prepared: PreparedData
    result: StepResult
    links: str
    """Words on the simulated links, if there are any."""

    @property
    def verdict(self) -> str:
        return agreement(self.result.variants, self.settings.all_reduce)

    @property
    def fastest(self) -> str:
        return f"{fastest_text(self.result.variants)}{self.links}"

    @property
    def hidden(self) -> str:
        return hidden_text(self.result.variants)

    def print_document(self, session: Session) -> None:
        names = ("batch_size", "bucket_cap", "all_reduce", "seed", "model")
        recipe = {name: getattr(self.settings, name) for name in names}
        session.print_document(
            {"run": self.result.parts},
            dataset=self.prepared.summary,
            **recipe,
            timed_steps=self.settings.steps,
            variants=self.result.variants,
            environment=self.result.environment,
        )


def announce_data(
    session: Session,
    dataset: str,
    asked: Settings,
    *about: Text,
    ready: PreparedData | None = None,
) -> tuple[PreparedData, Settings]:
    """Prepare the data `dataset`, unless it is `ready`, and say the head of the run: its world, the
    data, and `about`. Returns the data, and the settings `asked` for on it. Raises `NoData`, and
    `UsageError` for less data than one batch."""
    prepared = ready or prepare.prepare(
        dataset,
        prepare.default_data_dir(),
        os.environ.get(prepare.MIRROR),
        session.bar.announce,
    )
    asked.check_samples(prepared.train)
    session.say(f"{session.name}: {session.world}", f"data: {prepared}", *about)
    return prepared, prepared.settings(asked)


def over_links(session: Session, link: float) -> str:
    """The words on simulated links of `link` Gbit/s; none for 0. Raises `UsageError` where a link
    cannot be simulated."""
    if link and session.world.device != "cpu":
        raise UsageError(f"--link {link:g}: the simulation delays CPUs, on gloo: leave it out")
    return f", over simulated links of {link:g} Gbit/s" if link else ""


def measure_steps(session: Session, dataset: str, model: str, **chosen: Any) -> StepTimes:
    """Measure on the session's world, and say the table. Raises `UsageError` for what cannot be
    measured, and `PlaygroundError` if replicas differ that must not."""
    world, is_bert = session.world, model == BERT
    folder = Path() if is_bert else prepare.default_data_dir()
    given = {name: value for name, value in chosen.items() if value is not None}
    chosen = OF_BERT | given if is_bert else given
    asked = StepSettings(folder=folder, model=model, **chosen)
    asked.check_batch(world.size)
    if model == "resnet18" and asked.batch_size < 2 * world.size:
        why = (
            f"resnet18's BatchNorm needs two samples or more on each, so at least {2 * world.size}"
        )
        raise UsageError(f"--batch-size {asked.batch_size} for {world.size} ranks: {why}")
    world.warm_up(MEASURE)
    links = over_links(session, asked.link)
    work = f"training: {model}, {asked.steps} steps of {asked.batch_size} samples{links}"
    about = Table(
        "variant", Column("what it does", wraps=True), rows=candidates(model, asked.link).items()
    )
    ready = TOKENS if is_bert else None
    prepared, settings = announce_data(session, dataset, asked, work, "", about, ready=ready)
    assert isinstance(settings, StepSettings)
    times = StepTimes(settings, prepared, session.launch(MEASURE, settings)[0], links)
    agreement(times.result.variants, settings.all_reduce)
    session.say("", *result_texts(times.result.variants), "")
    return times


@session_command(
    "steps",
    *OPTIONS,
    only=COMMON,
    short_help="time a training step with each gradient synchronisation, and with DDP",
)
def command(session: Session, **chosen: Any) -> None:
    """Time a training step with each gradient synchronisation of ours, by any all-reduce, and with
    DistributedDataParallel, in turns.

    Replicas of one model train side by side, each with its own synchronisation, and a clock on each
    part of a step. In every round each replica takes one step, in random order, so that ratios are
    meaningful even on a machine that is busy with other work. All replicas must end with the same
    parameters.

    \b
        python -m playground bench steps
        python -m playground bench steps --model resnet18 --link 1
        python -m playground bench steps --model bert --all-reduce shared-memory
    """
    times = measure_steps(session, **chosen)
    session.say(prose(f"Measured: {times.fastest}; {times.hidden}; ", good(times.verdict), "."))
    times.print_document(session)
