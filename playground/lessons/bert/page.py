"""The command `bert`: the parts of the lesson, what each runs, on how many workers, and its text. Does not import
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import click

from playground.console.options import ALL, pack_options, refuse
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, bars, numbers
from playground.console.terminal import Bar
from playground.console.text import Prose, good, heading, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions
from playground.lessons import LESSONS
from playground.lessons.bert.settings import (
    DDP,
    LOSSES_TO_COMPARE,
    WAYS,
    BertSettings,
    compare_losses,
)
from playground.measurement import format_bytes
from playground.runtime import host
from playground.runtime.backends import get_backend
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag, flags_of, like
from playground.runtime.launcher.entry import World
from playground.runtime.rank.rank import Event
from playground.runtime.remote import Remote
from playground.training.bert_config import BertConfig, Tokenizer
from playground.training.pretrained import BASE, SCRATCH, load_pretrained
from playground.training.results import Row, replicas_verdict
from playground.training.sentence_pairs.prepare import DATASETS, PairsSource, prepare_pairs

TRAINING_LEGEND = (
    f"  loss: the mean over the last {LOSSES_TO_COMPARE} steps' global batches, before each step; speed: since the row "
    f"before."
)
PROGRESS = (
    Column("way", width=15),
    Column("step", right=True, width=6),
    Column("loss", right=True, width=8),
    Column("speed", "samples/s", right=True, width=11),
)
"""The columns of training while it runs."""


def training_table(trainings: Sequence[Row]) -> Table:
    """A row per way: the first and the last loss, and the accuracy of the model."""
    losses = ("first\nloss", "", ".4f"), ("last\nloss", "", ".4f")
    speed = ("speed", "samples/s", ",.0f"), ("time", "s", ".1f")
    figures = numbers("workers", *losses, ("test\naccuracy", "%", ".2f"), *speed)
    table = Table("way", *figures, *numbers(("test\npairs", "", ","), wide=True))
    for each in trainings:
        ends = each["losses"][0], fmean(each["losses"][-LOSSES_TO_COMPARE:])
        took = each["samples_per_second"], each["seconds"]
        table.add(each["way"], each["workers"], *ends, 100 * each["test_accuracy"], *took, each["tested"])
    return table


def same_texts(compared: Sequence[Row], settings: BertSettings) -> Texts:
    """The distance of each way's losses from those of one device."""
    losses = ("first\nloss", "", ".9f"), ("last\nloss", "", ".9f")
    figures = numbers("workers", "steps", *losses, ("largest difference\nto one device", "", ".1e"))
    return [Table("way", *figures, rows=(each.values() for each in compared))]


def speed_texts(speeds: Sequence[Row], settings: BertSettings) -> Texts:
    """A row per way, a column per number of workers."""
    rates = {(speed["way"], speed["workers"]): speed["samples_per_second"] for speed in speeds}
    counts = sorted({count for _, count in rates})
    rates_by = [(f"{count} worker{'s' * (count > 1)}", "samples/s", ",.0f") for count in counts]
    table = Table("way", *numbers(*rates_by, *((f"{count} to 1", "", ".2f") for count in counts[1:])))
    for way in dict.fromkeys(way for way, _ in rates):
        of_way = [rates.get((way, count)) for count in counts]
        table.add(way, *of_way, *(rate and rate / rates[way, counts[0]] for rate in of_way[1:]))
    return [table]


def memory_texts(ways: Mapping[str, Sequence[Row]], settings: BertSettings) -> Texts:
    """A bar per device and way, and the bytes by label."""
    rows = [
        (f"{way}, {f'rank {number}' if way == DDP else each['device']}", each["held"])
        for way, devices in ways.items()
        for number, each in enumerate(devices)
    ]
    labels = list(dict.fromkeys(label for _, held in rows for label in held))
    cells = ((name, *(held.get(label, 0) for label in labels)) for name, held in rows)
    table = Table("device", *numbers(*((label.replace(" ", "\n"), "bytes", ",") for label in labels)), rows=cells)
    about = (
        f"  A batch of {settings.batch_size} pairs, padded to {settings.max_length} tokens. Gradients are those of "
        f"parameters and, on the way back through the layers, of activations; optimizer state: Adam's two moments."
    )
    return [about, *bars(rows, labels, width=30), "", table]


def averaging_texts(found: Sequence[Row], settings: BertSettings) -> Texts:
    """A row per way to average."""
    times = ("step", "ms", ".1f"), ("exposed", "ms", ".2f"), ("alone", "ms", ".2f"), ("hidden", "%", ".0f")
    figures = ("messages", ("sent", "bytes", ","), ("early", "%", ".0f"), *times, ("distance\nto ddp", "", ".1e"))
    table = Table("gradients by", *numbers(*figures))
    for each in found:
        sent = each["messages"], each["bytes"], 100 * each["early_bytes"] / each["bytes"]
        took = 1000 * each["seconds"], 1000 * each["exposed"], 1000 * each["alone"], 100 * each["hidden"]
        table.add(each["way"], *sent, *took, each["difference_to_ddp"] or "0")
    about = (
        f"  Per step and rank, in buckets of {format_bytes(settings.bucket_cap)}. early: the share that leaves before "
        f"the last gradient is ready, as nothing else can be hidden; exposed: from the last gradient to the last "
        f"average; alone: the same averaging without a backward."
    )
    return [about, table, *(f"  {each['way']}: {each['caveat']}." for each in found if each["caveat"])]


LESSON = LESSONS["bert"]
TRAIN, SAME_LOSSES = LESSON.remote("train"), LESSON.remote("same_losses")
SPEED, MEMORY, AVERAGING = (LESSON.remote(name, "measure") for name in ("speed", "memory", "averaging"))
WORKERS = (1, 2, 4)
"""Numbers of workers on which the speed is measured."""


@dataclass(frozen=True)
class Runner:
    """Runs a part on the processes that it needs, by the ways that were asked for, and shows its result."""

    session: Session
    settings: BertSettings
    ways: tuple[str, ...]

    def run(self, code: Remote, settings: BertSettings, on_report: Callable[[int, Event], None] | None = None) -> Any:
        """The results of all ranks, in a world with as many ranks as the way takes."""
        return self.new_world(code, settings).run(RUN_TRAINING, code, settings, on_report=on_report or self.session.bar)

    def new_world(self, code: Remote, settings: BertSettings) -> World:
        """The world that was joined, or one with as many ranks as the way takes."""
        world = self.session.world
        self.session.bar.show(f"{code.name.replace('_', ' ')}: {settings.way}, {settings.workers} workers")
        if world.rank_env:
            return world
        same = {name: getattr(world, name) for name in ("backend", "timeout", "init_method", "around")}
        return World(settings.ranks, **same)

    def of_devices(self, code: Remote) -> dict[str, list[Any]]:
        """By way, the result for each device: all of one process, or one of each rank."""
        return {way: list(chain(*self.run(code, self.settings.on(way)))) for way in self.ways}

    def of_ways(self, code: Remote) -> list[Any]:
        """The result of each way, which all ranks share."""
        return [self.run(code, self.settings.on(way))[0] for way in self.ways]

    def of_ddp(self, code: Remote) -> Any:
        return self.run(code, self.settings.on(DDP))[0]

    def say(self, code: Remote, texts: Texts) -> None:
        """Show a part: its name, its summary, and its tables."""
        self.session.say("", prose(heading(code.name.replace("_", " ")), f": {code.summary}"), *texts)


def train(runner: Runner) -> list[Row]:
    """Train by each way, and show how far it has come while it does."""
    runner.say(TRAIN, [TRAINING_LEGEND])
    rows = runner.session.rows(*PROGRESS)

    def on_report(rank: int, event: Event) -> None:
        if rank == 0 and "progress" in event:
            way, step, loss, speed = event["progress"].values()
            rows.say(way, str(step), f"{loss:.4f}", f"{speed:,.0f}")
        runner.session.bar(rank, event)

    trainings = [runner.run(TRAIN, runner.settings.on(way), on_report)[0] for way in runner.ways]
    runner.session.say("", training_table(trainings))
    return trainings


def same_losses(runner: Runner, code: Remote) -> list[Row]:
    """Compare the losses of each way with those of one device."""
    return compare_losses(runner.run(code, runner.settings.on("data-parallel", 1))[0], runner.of_ways(code))


def speeds(runner: Runner, code: Remote) -> list[Row]:
    """Measure each way on 1, 2 and 4 workers, or as many of these as there are GPUs."""
    settings, counts = runner.settings, [count for count in WORKERS if runner.settings.batch_size % count == 0]
    pairs = [(way, count) for way in runner.ways for count in counts if count <= settings.most_workers(way)]
    return [runner.run(code, settings.on(*pair))[0] for pair in pairs]


def show(find: Callable[[Runner, Remote], Any], texts: Callable[..., Texts], code: Remote, runner: Runner) -> object:
    """The results of a part, which `find` gets from the ranks, and `texts` shows."""
    found = find(runner, code)
    runner.say(code, texts(found, runner.settings))
    return found


PARTS: dict[str, Callable[[Runner], object]] = {
    "train": train,
    "same-losses": partial(show, same_losses, same_texts, SAME_LOSSES),
    "speed": partial(show, speeds, speed_texts, SPEED),
    "memory": partial(show, Runner.of_devices, memory_texts, MEMORY),
    "averaging": partial(show, Runner.of_ddp, averaging_texts, AVERAGING),
}
"""By the names that --only takes."""
OWN_WORLDS = ("same-losses", "speed")
"""Parts that need other numbers of ranks than the one that was asked for."""


class Defaults(NamedTuple):
    """Defaults that depend on the weights."""

    batch_size: int
    lr: float
    max_length: int


SMALL, PRETRAINED = Defaults(BertSettings.batch_size, BertSettings.lr, 32), Defaults(128, 3e-5, 512)
"""For the small model from scratch, on short sentences; and the tutorials', for pretrained weights."""
ENCODER = ("transformers.models.bert.modeling_bert",)
"""What ranks that load pretrained weights import."""
WORKERS_AT_LEAST = 2
"""One device gets as many cores as each of two, so that the two can be twice as fast."""
DROPOUT = "0, pretrained as published"


def by_weights(name: str, shown: str) -> Any:
    """The flag of `BertSettings`, whose default depends on the weights: --help shows `shown`."""
    return like(BertSettings, name, None, click={"show_default": shown})


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """The options of `bert`. None where the default depends on the weights."""

    way: str = flag(ALL, "How to train.", choices=(*WAYS, ALL))
    only: tuple[str, ...] = flag((), "Run only this part; may be repeated.", choices=PARTS, click={"multiple": True})
    weights: str = flag(
        SCRATCH,
        f"Pretrained weights, through transformers: a model on the hub, such as {BASE}, or a folder.",
        metavar=f"{SCRATCH}|NAME|DIR",
    )
    dataset: str = flag(
        DATASETS[0],
        "generated: sentence pairs from a small grammar; multinli: MultiNLI from the hub, through datasets.",
        choices=DATASETS,
    )
    data_dir: Path | None = like(DataOptions, "data_dir", help="Directory where tokenised pairs are put.")
    steps: int = like(BertSettings, "steps")
    batch_size: int | None = by_weights("batch_size", f"{SMALL.batch_size}, pretrained {PRETRAINED.batch_size}")
    lr: float | None = by_weights("lr", f"{SMALL.lr:g}, pretrained {PRETRAINED.lr:.5f}")
    max_length: int | None = by_weights("max_length", f"{SMALL.max_length}, pretrained {PRETRAINED.max_length}")
    dropout: float | None = flag(
        None, "Probability that dropout zeroes a feature.", least=0, below=1, click={"show_default": DROPOUT}
    )

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.way == ALL else (self.way,)

    def parts(self, joined: bool) -> tuple[str, ...]:
        """The names of the parts to run. Raises `UsageError` for what a world that is `joined` cannot do."""
        if joined and self.way != DDP:
            todo = "add --way ddp, or run it without torchrun, RANK and WORLD_SIZE"
            raise UsageError(f"{LESSON.name} --way {self.way} drives all devices from one process: {todo}")
        for name in self.only:
            if joined and name in OWN_WORLDS:
                raise UsageError(f"--only {name} starts other numbers of ranks: run it without torchrun")
        left_out = {*(OWN_WORLDS if joined else ()), *(() if DDP in self.ways else (AVERAGING.name,))}
        return tuple(name for name in PARTS if name in (self.only or PARTS.keys() - left_out))


def without_ranks(only: Sequence[str], way: str, **others: object) -> str:
    """Why this way has no such part; empty if it has."""
    if AVERAGING.name not in only or way in (DDP, ALL):
        return ""
    return f"{AVERAGING.name} is about ranks that average gradients: leave out --way {way}"


@LESSON.run_by(
    pack_options("asked", BertOptions),
    refuse("only", why=lambda given: without_ranks(**given)),
)
def command(session: Session, asked: BertOptions) -> None:
    world = session.world
    parts = asked.parts(joined=world.rank_env is not None)
    world.warm_up(RUN_TRAINING, TRAIN, SPEED, *(ENCODER if asked.weights != SCRATCH else ()))
    config, pairs = prepare(asked, session.bar)
    settings = make_settings(asked, config, pairs, world, session.run.seed)
    settings.check_samples(pairs.train)
    session.say(*header(session, settings, pairs), *left_out(settings, asked.ways))
    runner = Runner(session, settings, asked.ways)
    found: dict[str, Any] = {name: PARTS[name](runner) for name in parts}
    for training in found.get("train", ()):
        if not all(map(math.isfinite, training["losses"])):
            click.echo(f"{training['way']} diverged: the loss is no longer finite; try a smaller --lr", err=True)
    session.say("", ending(session, found))
    about = {"weights": settings.weights, "model": settings.config, "batch_size": settings.batch_size}
    data = {"dataset": pairs.name, "train": pairs.train, "test": pairs.test}
    session.print_document({}, **about, **data, parts=found)


def prepare(asked: BertOptions, bar: Bar) -> tuple[BertConfig | None, PairsSource]:
    """The config of the pretrained model, if one is asked for, and the pairs, on this host; announces what takes long.
    Raises `UsageError`."""
    config: BertConfig | None = None
    tokenizer: Tokenizer | None = None
    if asked.weights != SCRATCH:
        bar.announce(f"loading {asked.weights} and its tokenizer")
        config, tokenizer = load_pretrained(asked.weights)
    return config, prepare_pairs(asked.dataset, asked.data_dir, tokenizer, bar.announce)


def make_settings(
    asked: BertOptions, pretrained: BertConfig | None, pairs: PairsSource, world: World, seed: int
) -> BertSettings:
    """The settings asked for, with the defaults that suit the weights and the data. Raises `UsageError`."""
    defaults = PRETRAINED if pretrained else SMALL
    length = max(BertConfig.max_length, asked.max_length or 0)
    config = pretrained or BertConfig(vocabulary=pairs.vocabulary, max_length=length, dropout=0.0)
    if asked.dropout is not None:
        config = replace(config, dropout=asked.dropout)
    chosen: dict[str, Any] = {**defaults._asdict(), "max_length": min(defaults.max_length, config.max_length)}
    chosen |= {name: value for name in flags_of(BertSettings) if (value := getattr(asked, name)) is not None}
    return BertSettings(
        folder=pairs.folder,
        config=config,
        weights=asked.weights,
        workers=world.size,
        device_type=world.device,
        device_count=get_backend(world.backend).count_devices(),
        threads=host.threads_per_rank(max(world.size, WORKERS_AT_LEAST)),
        seed=seed,
        **chosen,
    )


def header(session: Session, settings: BertSettings, pairs: PairsSource) -> list[str]:
    """The workers, the model, the data and the training."""
    config, count = settings.config, settings.workers
    return [
        f"{LESSON.name}: {session.world.backend} on {session.world.device}, {count} worker{'s' * (count > 1)}: devices "
        f"of one process, or ranks with a device each",
        f"model: {config.layers} layers of width {config.width}, {config.parameters:,} parameters "
        f"({format_bytes(4 * config.parameters)}), "
        f"{'from scratch' if settings.weights == SCRATCH else f'pretrained: {settings.weights}'}",
        f"data: {pairs.name} ({pairs.train:,} + {pairs.test:,} pairs; {pairs.origin})",
        f"training: {settings.steps} steps of {settings.batch_size} pairs, Adam, learning rate {settings.lr:g}",
    ]


def left_out(settings: BertSettings, ways: Sequence[str]) -> list[str]:
    """A line about the ways that drive fewer devices than asked for, if there are any."""
    fewer = {way: count for way in ways if (count := settings.on(way).workers) < settings.workers}
    if not fewer:
        return []
    driven, there = f"{min(fewer.values())} of {settings.workers} devices", settings.device_count
    return [f"{' and '.join(fewer)}: on {driven}, since one process finds {there} GPU{'s' * (there > 1)} here"]


def ending(session: Session, found: dict[str, Any]) -> Prose:
    """The last line. Raises `PlaygroundError` if the replicas of ddp are no longer one model."""
    differences = [each["replicas_max_difference"] for each in found.get("train", ()) if each["way"] == DDP]
    verdict = [part for each in differences for part in ("; ", good(replicas_verdict(each)))]
    return prose(f"Shown: {LESSON.conclude(session.world.size)}", *verdict, ".")
