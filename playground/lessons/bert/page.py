"""The command `bert`: the parts of the lesson, what each runs, on how many workers, and its text. Does not import
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click

from playground.console.options import ALL, MemorySize, RunOptions, pack_options, run_options
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, bars, numbers
from playground.console.terminal import Bar
from playground.console.text import Prose, good, heading, prose
from playground.console.training import RUN_TRAINING, NoticePrinter, echo_restarts, resumable_if_preempted
from playground.console.training_options import DataOptions, SnapshotOptions, snapshot_options
from playground.lessons import LESSONS
from playground.lessons.bert.settings import (
    BYTES_PER_PARAMETER,
    DDP,
    LOSSES_TO_COMPARE,
    WAYS,
    Averaging,
    BertSettings,
    Equality,
    Held,
    LargestBatch,
    PartReady,
    Speed,
    Training,
    Use,
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
from playground.survival.settings import AUTO, NO
from playground.training.bert_config import BertConfig
from playground.training.bert_weights import WeightsSource, find_weights
from playground.training.results import replicas_verdict
from playground.training.sentence_pairs.prepare import DATASETS, PairsSource, prepare_pairs
from playground.training.sentence_pairs.wordpiece import read_wordpiece

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


def training_table(trainings: Sequence[Training]) -> Table:
    """A row per way: the first and the last loss, and the accuracy of the model."""
    figures = ("workers", "first\nloss", "last\nloss", ("test\naccuracy", "%"), ("speed", "samples/s"), ("time", "s"))
    table = Table("way", *numbers(*figures), *numbers("test\npairs", wide=True))
    for each in trainings:
        losses = f"{each.losses[0]:.4f}", f"{each.last_loss:.4f}", f"{100 * each.test_accuracy:.2f}"
        speed = f"{each.samples_per_second:,.0f}", f"{each.seconds:.1f}"
        table.add(each.way, str(each.workers), *losses, *speed, f"{each.tested:,}")
    return table


def same_texts(compared: Sequence[Equality], settings: BertSettings) -> Texts:
    """The distance of each way's losses from those of one device."""
    table = Table("way", *numbers("workers", "steps", "first\nloss", "last\nloss", "largest difference\nto one device"))
    for each in compared:
        losses = f"{each.first:.9f}", f"{each.last:.9f}", f"{each.difference:.1e}"
        table.add(each.way, str(each.workers), str(each.steps), *losses)
    return [table]


def speed_texts(speeds: Sequence[Speed], settings: BertSettings) -> Texts:
    """A row per way, a column per number of workers."""
    counts = sorted({speed.workers for speed in speeds})
    rates_by = [(f"{count} worker{'s' * (count > 1)}", "samples/s") for count in counts]
    table = Table("way", *numbers(*rates_by, *(f"{count} to 1" for count in counts[1:])))
    for way in dict.fromkeys(speed.way for speed in speeds):
        of_way = {speed.workers: speed.samples_per_second for speed in speeds if speed.way == way}
        rates = [f"{of_way[count]:,.0f}" if count in of_way else "-" for count in counts]
        gains = [f"{of_way[count] / of_way[counts[0]]:.2f}" if count in of_way else "-" for count in counts[1:]]
        table.add(way, *rates, *gains)
    return [table]


def utilisation_texts(ways: Mapping[str, Sequence[Use]], settings: BertSettings) -> Texts:
    """The share of a step in which each device computes: a row per way, a column per device or rank."""
    count = max(map(len, ways.values()))
    table = Table("way", *numbers(*((f"device {number}", "%") for number in range(count))))
    for way, devices in ways.items():
        shares = [f"{100 * device.computing:.0f}" for device in devices]
        table.add(way, *shares, *(count - len(shares)) * ["-"])
    return [table]


def memory_texts(ways: Mapping[str, Sequence[Held]], settings: BertSettings) -> Texts:
    """A bar per device and way, and the bytes by label."""
    rows = [
        (f"{way}, {f'rank {number}' if way == DDP else each.device}", each.held)
        for way, devices in ways.items()
        for number, each in enumerate(devices)
    ]
    labels = list(dict.fromkeys(label for _, held in rows for label in held))
    cells = [(name, *(f"{held.get(label, 0):,}" for label in labels)) for name, held in rows]
    table = Table("device", *numbers(*((label.replace(" ", "\n"), "bytes") for label in labels)), rows=cells)
    about = (
        f"  A batch of {settings.batch_size} pairs, padded to {settings.max_length} tokens. Gradients are those of "
        f"parameters and, on the way back through the layers, of activations; optimizer state: Adam's two moments."
    )
    return [about, *bars(rows, labels, width=30), "", table]


def largest_texts(found: Sequence[LargestBatch], settings: BertSettings) -> Texts:
    """The largest batch by each way."""
    table = Table("way", *numbers("workers", "largest\nbatch"), "fullest\ndevice", *numbers(("holds", "bytes")))
    for each in found:
        fullest = "every rank's" if each.way == DDP else each.fullest
        table.add(each.way, str(each.workers), str(each.batch_size), fullest, f"{each.peak:,}")
    cap, length = format_bytes(settings.memory_cap), settings.max_length
    return [f"  Memory cap: {cap} for each device; every pair is padded to {length} tokens.", table]


def ready_texts(parts: Sequence[PartReady], settings: BertSettings) -> Texts:
    """A row per part of the model, in the order in which backward has its gradients."""
    total = sum(part.bytes for part in parts)
    figures = ("gradients", "bytes"), ("of all", "%"), ("ready after", "% of backward")
    table = Table("part of the model", *numbers(*figures))
    for part in parts:
        table.add(part.part, f"{part.bytes:,}", f"{100 * part.bytes / total:.1f}", f"{100 * part.ready:.1f}")
    [words] = [part for part in parts if part.rows_used is not None]
    about = (
        f"  Of the {settings.config.vocabulary:,} rows of the word embeddings a step uses {words.rows_used:,}: the "
        f"gradient of the others is zero, and DDP sends it all the same."
    )
    return [table, about]


def averaging_texts(found: Sequence[Averaging], settings: BertSettings) -> Texts:
    """A row per way to average."""
    times = ("step", "ms"), ("exposed", "ms"), ("alone", "ms"), ("hidden", "%")
    figures = ("messages", ("sent", "bytes"), ("early", "%"), *times, "distance\nto ddp")
    table = Table("gradients by", *numbers(*figures))
    for each in found:
        sent = str(each.messages), f"{each.bytes:,}", f"{100 * each.early_bytes / each.bytes:.0f}"
        took = f"{1000 * each.seconds:.1f}", f"{1000 * each.exposed:.2f}", f"{1000 * each.alone:.2f}"
        distance = f"{each.difference_to_ddp:.1e}" if each.difference_to_ddp else "0"
        table.add(each.way, *sent, *took, f"{100 * each.hidden:.0f}", distance)
    about = (
        f"  Per step and rank, in buckets of {format_bytes(settings.bucket_cap)}. early: the share that leaves before "
        f"the last gradient is ready, as nothing else can be hidden; exposed: from the last gradient to the last "
        f"average; alone: the same averaging without a backward."
    )
    return [about, table, *(f"  {each.way}: {each.caveat}." for each in found if each.caveat)]


LESSON = LESSONS["bert"]
TRAIN, TRAIN_ON, SAME_LOSSES = LESSON.remote("train"), LESSON.remote("train", "resumable"), LESSON.remote("same_losses")
SPEED, UTILISATION, MEMORY, LARGEST, READY, AVERAGING = (
    LESSON.remote(name, "measure") for name in ("speed", "utilisation", "memory", "largest", "ready", "averaging")
)
WORKERS = (1, 2, 4)
"""Numbers of workers on which the speed is measured."""


@dataclass(frozen=True)
class Runner:
    """Runs a part on the processes that it needs, by the ways that were asked for, and shows its result. Snapshots and
    restarts are for training alone: the other parts are short."""

    session: Session
    bar: Bar
    settings: BertSettings
    ways: tuple[str, ...]
    survival: SnapshotOptions

    def run(self, code: Remote, settings: BertSettings) -> Any:
        """The results of all ranks, in a world with as many ranks as the way takes."""
        return self.new_world(code, settings).run(RUN_TRAINING, code, settings, on_report=self.bar)

    def train(self, settings: BertSettings, on_report: Callable[[int, Event], None]) -> Training:
        """Training by one way, with snapshots and restarts if they are asked for. Of several ways, each has its own
        folder for snapshots in the one that was asked for."""
        survival, snapshots = self.survival, self.survival.settings
        if snapshots and len(self.ways) > 1:
            snapshots = replace(snapshots, folder=snapshots.folder / settings.way)
        world = self.new_world(TRAIN, settings, survival.restarts)
        training = (TRAIN_ON, settings, (snapshots,)) if snapshots else (TRAIN, settings)
        on_restart, grace = echo_restarts(survival.restarts), survival.grace_of_ranks
        with resumable_if_preempted(self.session, survival):
            ran = world.run(RUN_TRAINING, *training, on_report=on_report, on_restart=on_restart, grace=grace)
        return ran[0]

    def new_world(self, code: Remote, settings: BertSettings, restarts: int = 0) -> World:
        """The world that was joined, or one with as many ranks as the way takes."""
        world = self.session.world
        self.bar.show(f"{code.name.replace('_', ' ')}: {settings.way}, {settings.workers} workers")
        if world.rank_env:
            return world
        same = {name: getattr(world, name) for name in ("backend", "timeout", "init_method", "around")}
        return World(settings.ranks, restarts=restarts, **same)

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


def train(runner: Runner) -> list[Training]:
    """Train by each way, and show how far it has come while it does."""
    runner.say(TRAIN, [TRAINING_LEGEND])
    rows = runner.session.rows(*PROGRESS)
    shown, notices = dict.fromkeys(runner.ways, 0), NoticePrinter()

    def on_report(rank: int, event: Event) -> None:
        if rank == 0 and "resumed" in event:
            runner.session.say("  going on after step {total}".format(**event["resumed"]))
        if rank == 0 and "progress" in event:
            way, step, loss, speed = event["progress"].values()
            if step > shown[way]:
                shown[way] = step  # a world that was restarted may report it again
                rows.say(way, str(step), f"{loss:.4f}", f"{speed:,.0f}")
        notices(rank, event)
        runner.bar(rank, event)

    trainings = [runner.train(runner.settings.on(way), on_report) for way in runner.ways]
    runner.session.say("", training_table(trainings))
    return trainings


def same_losses(runner: Runner, code: Remote) -> list[Equality]:
    """Compare the losses of each way with those of one device."""
    return compare_losses(runner.run(code, runner.settings.on("data-parallel", 1))[0], runner.of_ways(code))


def speeds(runner: Runner, code: Remote) -> list[Speed]:
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
    "utilisation": partial(show, Runner.of_devices, utilisation_texts, UTILISATION),
    "memory": partial(show, Runner.of_devices, memory_texts, MEMORY),
    "largest": partial(show, Runner.of_ways, largest_texts, LARGEST),
    "ready": partial(show, Runner.of_ddp, ready_texts, READY),
    "averaging": partial(show, Runner.of_ddp, averaging_texts, AVERAGING),
}
"""By the names that --only takes."""
OWN_WORLDS = ("same-losses", "speed")
"""Parts that need other numbers of ranks than the one that was asked for."""
OF_DDP = ("ready", "averaging")
"""Parts about ranks that average gradients, whatever the ways."""


class Defaults(NamedTuple):
    """Defaults that depend on what is trained: here those of a small model from scratch."""

    batch_size: int = BertSettings.batch_size
    lr: float = BertSettings.lr
    max_length: int = BertSettings.max_length


SCRATCH, PRETRAINED, GENERATED = Defaults(), Defaults(128, 3e-5, 512), Defaults(max_length=32)
"""For weights from scratch; the tutorials' for pretrained ones; and for generated sentences, which are short."""
WORKERS_AT_LEAST = 2
"""One device gets as many cores as each of two, so that the two can be twice as fast."""
CAP = 5
"""The memory cap by default, in times of what the model alone needs."""
DROPOUT = "0, pretrained as published"


def by_weights(name: str, shown: str, **about: Any) -> Any:
    """The flag of `BertSettings`, whose default depends on the weights, or on other options: --help shows `shown`."""
    return like(BertSettings, name, None, click={"show_default": shown, **about})


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """The options of `bert`. None where the default depends on the weights."""

    way: str = flag(ALL, "How to train.", choices=(*WAYS, ALL))
    only: tuple[str, ...] = flag((), "Run only this part; may be repeated.", choices=PARTS, click={"multiple": True})
    weights: str = flag(
        "auto",
        "Pretrained weights: a folder, or a model on the hub such as bert-base-cased; minilm: a package's. auto: "
        "bert-base-cased on GPUs if it can be had, else from scratch.",
        metavar="auto|scratch|minilm|DIR|NAME",
    )
    dataset: str = flag(
        "auto",
        "auto: MultiNLI if it is in --data-dir or on the hub, else sentence pairs from a small grammar.",
        choices=DATASETS,
    )
    data_dir: Path | None = like(
        DataOptions, "data_dir", help="Directory with MultiNLI's .jsonl files; tokenised pairs are put there."
    )
    steps: int = like(BertSettings, "steps")
    batch_size: int | None = by_weights("batch_size", f"{SCRATCH.batch_size}, pretrained {PRETRAINED.batch_size}")
    lr: float | None = by_weights("lr", f"{SCRATCH.lr:g}, pretrained {PRETRAINED.lr:.5f}")
    max_length: int | None = by_weights(
        "max_length", f"{SCRATCH.max_length}, generated {GENERATED.max_length}, pretrained {PRETRAINED.max_length}"
    )
    dropout: float | None = flag(
        None, "Probability that dropout zeroes a feature.", least=0, below=1, click={"show_default": DROPOUT}
    )
    loader_workers: int = like(BertSettings, "loader_workers")
    report_every: int | None = by_weights("report_every", "a sixth of --steps")
    memory_cap: int | None = by_weights("memory_cap", f"{CAP} times what the model alone needs", type=MemorySize())

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
            if name in OF_DDP and DDP not in self.ways:
                raise UsageError(f"--only {name} is about ranks that average gradients: leave out --way {self.way}")
        left_out = {*(OWN_WORLDS if joined else ()), *(OF_DDP if DDP not in self.ways else ())}
        return tuple(name for name in PARTS if name in (self.only or PARTS.keys() - left_out))

    def check_effect(self, parts: tuple[str, ...], survival: SnapshotOptions) -> None:
        """Raise `UsageError` for an option that changes nothing in these parts."""
        for option, value, part in (
            ("--memory-cap", self.memory_cap, LARGEST.name),
            ("--report-every", self.report_every, TRAIN.name),
            ("--snapshots", survival.snapshots, TRAIN.name),
            ("--restarts", survival.restarts, TRAIN.name),
        ):
            if value and part not in parts:
                raise UsageError(f"{option} has no effect without the part {part}: add --only {part}")


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@pack_options("asked", BertOptions)
@snapshot_options
def command(run: RunOptions, asked: BertOptions, survival: SnapshotOptions) -> None:
    session = Session(LESSON.name, run, default_size=LESSON.default_size, restarts=survival.restarts)
    world = session.world
    parts = asked.parts(joined=world.rank_env is not None)
    asked.check_effect(parts, survival)
    if len(asked.ways) > 1 and survival.resume not in (AUTO, NO):
        raise UsageError(f"--resume {survival.resume}: a snapshot is of one way, add --way")
    world.warm_up(RUN_TRAINING, TRAIN, TRAIN_ON, SPEED)
    with session.bar() as bar:
        weights, pairs = prepare(asked, world.device == "cuda", bar)
        settings = make_settings(asked, weights, pairs, world, run.seed)
        settings.check_samples(pairs.train)
        session.say(*header(session, settings, pairs), *left_out(settings, asked.ways))
        runner = Runner(session, bar, settings, asked.ways, survival)
        found: dict[str, Any] = {name: PARTS[name](runner) for name in parts}
    for training in found.get("train", ()):
        if not all(map(math.isfinite, training.losses)):
            click.echo(f"{training.way} diverged: the loss is no longer finite; try a smaller --lr", err=True)
    session.say("", ending(session, found))
    about = {"weights": weights.name, "why_weights": weights.why, "model": settings.config}
    data = {"dataset": pairs.name, "why_dataset": pairs.why, "train": pairs.train, "test": pairs.test}
    chosen = {"batch_size": settings.batch_size, "memory_cap": settings.memory_cap}
    session.print_document({}, **about, **data, **chosen, parts=found)


def prepare(asked: BertOptions, gpus: bool, bar: Bar) -> tuple[WeightsSource, PairsSource]:
    """The weights and the pairs, on this host; announces what takes long."""
    weights = find_weights(asked.weights, gpus, bar.announce)
    if weights.config and asked.max_length:
        weights.config.check_length(asked.max_length)
    tokenizer = read_wordpiece(weights.folder) if weights.folder else None
    return weights, prepare_pairs(asked.dataset, asked.data_dir, tokenizer, bar.announce)


def make_settings(
    asked: BertOptions, weights: WeightsSource, pairs: PairsSource, world: World, seed: int
) -> BertSettings:
    """The settings asked for, with the defaults that suit the weights and the data. Raises `UsageError`."""
    defaults = PRETRAINED if weights.folder else GENERATED if pairs.name == "generated" else SCRATCH
    length = max(64, asked.max_length or defaults.max_length)
    config = weights.config or BertConfig(vocabulary=pairs.vocabulary, max_length=length, dropout=0.0)
    if asked.dropout is not None:
        config = replace(config, dropout=asked.dropout)
    chosen: dict[str, Any] = {
        **defaults._asdict(),
        "max_length": min(defaults.max_length, config.max_length),
        "report_every": -(-asked.steps // 6),
        "memory_cap": CAP * BYTES_PER_PARAMETER * config.parameters,
    }
    chosen |= {name: value for name in flags_of(BertSettings) if (value := getattr(asked, name)) is not None}
    return BertSettings(
        folder=pairs.folder,
        config=config,
        weights=weights,
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
        f"({format_bytes(4 * config.parameters)}); {settings.weights.name} ({settings.weights.why})",
        f"data: {pairs.name} ({pairs.train:,} + {pairs.test:,} pairs; {pairs.why})",
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
    differences = [each.replicas_max_difference for each in found.get("train", ()) if each.way == DDP]
    verdict = [part for each in differences for part in ("; ", good(replicas_verdict(each)))]
    return prose(f"Shown: {LESSON.conclude(session.world.size)}", *verdict, ".")
