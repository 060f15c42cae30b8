"""The command `bert`: three ways to train it, and what each of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from playground.console.memory_cap import MemorySize
from playground.console.names import ALL
from playground.console.options import Finite, RunOptions, pack_options, run_options
from playground.console.paths import FilePath
from playground.console.progress import Bar
from playground.console.session import Session
from playground.console.snapshot_options import SnapshotOptions, snapshot_options
from playground.console.text import Prose, good, prose
from playground.console.training import RUN_TRAINING
from playground.lessons import LESSONS
from playground.lessons.bert.parts import (
    AVERAGING,
    LARGEST,
    MEMORY,
    OF_DDP,
    OWN_WORLDS,
    PARTS,
    SPEED,
    TRAIN,
    TRAIN_ON,
    Runner,
)
from playground.lessons.bert.settings import BYTES_PER_PARAMETER, DDP, WAYS, BertSettings
from playground.measurement.units import format_bytes
from playground.runtime import host
from playground.runtime.backends import get_backend
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.training.bert_config import BertConfig
from playground.training.bert_weights import WeightsSource, find_weights
from playground.training.results import replicas_verdict
from playground.training.sentence_pairs.prepare import DATASETS, PairsSource, prepare_pairs
from playground.training.sentence_pairs.vocabulary import read_wordpiece
from playground.training.settings import MAX_LOADER_WORKERS
from playground.training.snapshots.settings import AUTO, NO

LESSON = LESSONS["bert"]
PRETRAINED = {"batch_size": 128, "lr": 3e-5, "max_length": 512}
FROM_SCRATCH = {"batch_size": 64, "lr": 1e-3, "max_length": 64}
GENERATED = {**FROM_SCRATCH, "max_length": 32}
"""Defaults by what is trained: the tutorials' for pretrained weights, others for a small model."""
WORKERS_AT_LEAST = 2
"""One device gets as many cores as each of two, so that the two can be twice as fast."""
CAP = 5
"""The memory cap by default, in times of what the model alone needs."""


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """What is asked for. Empty where the default depends on the weights."""

    way: str
    only: tuple[str, ...]
    weights: str
    dataset: str
    data_dir: Path | None
    steps: int
    batch_size: int | None
    lr: float | None
    max_length: int | None
    dropout: float | None
    loader_workers: int
    report_every: int | None
    memory_cap: int | None

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.way == ALL else (self.way,)

    def parts(self, joined: bool) -> tuple[str, ...]:
        """The names of the parts to run. Raises `UsageError` for what a world that is `joined` cannot do."""
        if joined and self.way != DDP:
            raise UsageError(
                f"{LESSON.name} --way {self.way} drives all devices from one process: add --way ddp, or run it "
                f"without torchrun, RANK and WORLD_SIZE"
            )
        for name in self.only:
            if joined and name in OWN_WORLDS:
                raise UsageError(f"--only {name} starts other numbers of ranks: run it without torchrun")
            if name in OF_DDP and DDP not in self.ways:
                raise UsageError(f"--only {name} is about ranks that average gradients: leave out --way {self.way}")
        left_out = {*(OWN_WORLDS if joined else ()), *(OF_DDP if DDP not in self.ways else ())}
        return tuple(name for name in PARTS if name in (self.only or PARTS.keys() - left_out))

    def check_effect(self, parts: tuple[str, ...], survival: SnapshotOptions) -> None:
        """Raise `UsageError` for an option that changes nothing in these parts."""
        given = {
            "--memory-cap": (self.memory_cap, LARGEST), "--report-every": (self.report_every, TRAIN),
            "--snapshots": (survival.snapshots, TRAIN), "--restarts": (survival.restarts, TRAIN),
        }  # fmt: skip
        for option, (value, part) in given.items():
            if value and part.name not in parts:
                raise UsageError(f"{option} has no effect without the part {part.name}: add --only {part.name}")


bert_options = pack_options(
    "asked", BertOptions,
    click.option("--way", type=click.Choice((*WAYS, ALL)), default=ALL, show_default=True, help="How to train."),
    click.option("--only", type=click.Choice(tuple(PARTS)), multiple=True, help="Run only this part; may be repeated."),
    click.option(
        "--weights", default="auto", show_default=True, metavar="auto|scratch|minilm|DIR|NAME",
        help="Pretrained weights: a folder, or a model on the hub such as bert-base-cased; minilm: a package's. auto: "
        "bert-base-cased on GPUs if it can be had, else from scratch.",
    ),
    click.option(
        "--dataset", type=click.Choice(DATASETS), default="auto", show_default=True,
        help="auto: MultiNLI if it is in --data-dir or on the hub, else sentence pairs from a small grammar.",
    ),
    click.option(
        "--data-dir", type=FilePath(), envvar="PLAYGROUND_DATA_DIR", show_default="~/.cache/playground",
        help="Directory with MultiNLI's .jsonl files; tokenised pairs are put there.",
    ),
    click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Steps to train."),
    click.option(
        "--batch-size", type=click.IntRange(1), show_default="64, pretrained 128",
        help="Global batch size: pairs per step, over all workers.",
    ),
    click.option("--lr", type=Finite(0), show_default="0.001, pretrained 0.00003", help="Learning rate of Adam."),
    click.option(
        "--max-length", type=click.IntRange(5), show_default="64, generated 32, pretrained 512",
        help="Tokens that a pair is cut to.",
    ),
    click.option(
        "--dropout", type=Finite(0, 1, max_open=True), show_default="0, pretrained as published",
        help="Probability that dropout zeroes a feature.",
    ),
    click.option(
        "--loader-workers", type=click.IntRange(0, MAX_LOADER_WORKERS), default=0, show_default=True,
        help="Processes that assemble batches, for each process that trains.",
    ),
    click.option(
        "--report-every", type=click.IntRange(1), show_default="a sixth of --steps", metavar="STEPS",
        help="Steps between two reports of the loss.",
    ),
    click.option(
        "--memory-cap", type=MemorySize(), metavar="SIZE", show_default=f"{CAP} times what the model alone needs",
        help="Memory that each device may hold, where the largest batch is looked for, as in 64MiB.",
    ),
)  # fmt: skip
"""Gives a command the argument `asked`: its `BertOptions`."""


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@bert_options
@snapshot_options
def command(run: RunOptions, asked: BertOptions, survival: SnapshotOptions) -> None:
    session = Session(LESSON.name, run, default_size=LESSON.default_size, restarts=survival.restarts)
    world = session.world
    parts = asked.parts(joined=world.rank_env is not None)
    asked.check_effect(parts, survival)
    if len(asked.ways) > 1 and survival.resume not in (AUTO, NO):
        raise UsageError(f"--resume {survival.resume}: a snapshot is of one way, add --way")
    world.warm_up(RUN_TRAINING, TRAIN, TRAIN_ON, SPEED, MEMORY, AVERAGING)
    with session.bar() as bar:
        weights, pairs = prepare(asked, world.device == "cuda", bar)
        settings = make_settings(asked, weights, pairs, world, run.seed)
        settings.check_samples(pairs.train)
        session.say(*header(session, settings, pairs), *left_out(settings, asked.ways))
        runner = Runner(session, bar, settings, asked.ways, survival)
        found: dict[str, Any] = {name: PARTS[name](runner) for name in parts}
    for training in found.get("train", ()):
        if training.diverged:
            click.echo(f"{training.way} diverged: the loss is no longer finite; try a smaller --lr", err=True)
    session.say("", ending(session, found))
    session.print_document(
        {}, weights=weights.name, why_weights=weights.why, model=settings.config, dataset=pairs.name,
        why_dataset=pairs.why, train=pairs.train, test=pairs.test, batch_size=settings.batch_size,
        memory_cap=settings.memory_cap, parts=found,
    )  # fmt: skip


def prepare(asked: BertOptions, gpus: bool, bar: Bar) -> tuple[WeightsSource, PairsSource]:
    """The weights and the pairs, on this host; what takes long is said."""
    weights = find_weights(asked.weights, gpus, bar.announce)
    if weights.config and asked.max_length:
        weights.config.check_length(asked.max_length)
    tokenizer = read_wordpiece(weights.folder) if weights.folder else None
    return weights, prepare_pairs(asked.dataset, asked.data_dir, tokenizer, bar.announce)


def make_settings(
    asked: BertOptions, weights: WeightsSource, pairs: PairsSource, world: World, seed: int
) -> BertSettings:
    """What is asked for, with the defaults that suit the weights and the data. Raises `UsageError`."""
    defaults = PRETRAINED if weights.folder else GENERATED if pairs.name == "generated" else FROM_SCRATCH
    max_length = asked.max_length or int(defaults["max_length"])
    config = weights.config or BertConfig(vocabulary=pairs.vocabulary, max_length=max(64, max_length), dropout=0.0)
    if asked.dropout is not None:
        config = replace(config, dropout=asked.dropout)
    if asked.max_length is None:
        max_length = min(max_length, config.max_length)
    return BertSettings(
        folder=pairs.folder, config=config, weights=weights, workers=world.size, device_type=world.device,
        device_count=get_backend(world.backend).count_devices(),
        threads=host.threads_per_rank(max(world.size, WORKERS_AT_LEAST)),
        batch_size=asked.batch_size or int(defaults["batch_size"]), steps=asked.steps,
        lr=defaults["lr"] if asked.lr is None else asked.lr, max_length=max_length,
        loader_workers=asked.loader_workers, report_every=asked.report_every or -(-asked.steps // 6),
        memory_cap=asked.memory_cap or CAP * BYTES_PER_PARAMETER * config.parameters, seed=seed,
    )  # fmt: skip


def header(session: Session, settings: BertSettings, pairs: PairsSource) -> list[str]:
    """What is trained, on what, and by whom."""
    config, count = settings.config, settings.workers
    return [
        f"{LESSON.name}: {session.world.backend} on {session.world.device}, {count} worker{'s' * (count > 1)}: devices "
        f"of one process, or ranks with a device each",
        f"model: {config.layers} layers of width {config.width}, {config.parameters:,} parameters "
        f"({format_bytes(4 * config.parameters)}); {settings.weights.name} ({settings.weights.why})",
        f"data: {pairs.name} ({pairs.train:,} + {pairs.test:,} pairs; {pairs.why})",
        f"training: {settings.steps} steps of {settings.batch_size} pairs, Adam, learning rate {settings.lr:g}",
    ]


def left_out(settings: BertSettings, ways: Sequence[str]) -> list[str]:
    """What the ways of one process leave out, in a line, if there are fewer devices than it is asked to drive."""
    fewer = {way: count for way in ways if (count := settings.on(way).workers) < settings.workers}
    if not fewer:
        return []
    driven, there = f"{min(fewer.values())} of {settings.workers} devices", settings.device_count
    return [f"{' and '.join(fewer)}: on {driven}, since one process finds {there} GPU{'s' * (there > 1)} here"]


def ending(session: Session, found: dict[str, Any]) -> Prose:
    """What has been shown. Raises `PlaygroundError` if the replicas of ddp are no longer one model."""
    shown = f"Shown: {LESSON.conclude(session.world.size)}"
    for training in found.get("train", ()):
        if training.way == DDP:
            return prose(shown, "; ", good(replicas_verdict(training.replicas_max_difference)), ".")
    return prose(shown, ".")
