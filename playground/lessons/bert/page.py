"""The command `bert`: the parts of the lesson, what each runs, on how many workers, and what is shown of it. Does not
import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from playground.console.tables import Column, Table, bars, cell
from playground.console.text import Prose, good, heading, prose
from playground.console.training import RUN_TRAINING, NoticePrinter, echo_restarts, resumable_if_preempted
from playground.console.training_options import SnapshotOptions, snapshot_options
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
    Progress,
    Speed,
    Training,
    Use,
    compare_losses,
)
from playground.measurement import format_bytes
from playground.runtime import host
from playground.runtime.backends import get_backend
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.runtime.rank import Event
from playground.runtime.remote import Remote
from playground.survival.settings import AUTO, NO, SnapshotSettings
from playground.training.bert_config import BertConfig
from playground.training.bert_weights import WeightsSource, find_weights
from playground.training.results import replicas_verdict
from playground.training.sentence_pairs.prepare import DATASETS, PairsSource, prepare_pairs
from playground.training.sentence_pairs.vocabulary import read_wordpiece
from playground.training.settings import MAX_LOADER_WORKERS

Texts = list[str | Prose | Table]
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
"""The columns of training while it goes on."""


def part_texts(code: Remote, texts: Texts) -> Texts:
    """A part: its name, what it is about, and its tables."""
    return ["", prose(heading(code.name.replace("_", " ")), f": {code.summary}"), *texts]


def progress_cells(progress: Progress) -> list[str]:
    """A cell for each of `PROGRESS`."""
    return [progress.way, str(progress.step), f"{progress.loss:.4f}", f"{progress.samples_per_second:,.0f}"]


def training_table(trainings: Sequence[Training]) -> Table:
    """A row per way: from which loss to which, and what the model then gets right."""
    table = Table(
        Column("way"),
        Column("workers", right=True),
        Column("first\nloss", right=True),
        Column("last\nloss", right=True),
        Column("test\naccuracy", "%", right=True),
        Column("speed", "samples/s", right=True),
        Column("time", "s", right=True),
        Column("test\npairs", right=True, wide=True),
    )
    for each in trainings:
        table.add(
            each.way, str(each.workers), f"{each.losses[0]:.4f}", f"{each.last_loss:.4f}",
            f"{100 * each.test_accuracy:.2f}", f"{each.samples_per_second:,.0f}", f"{each.seconds:.1f}",
            f"{each.tested:,}",
        )  # fmt: skip
    return table


def same_texts(compared: Sequence[Equality]) -> Texts:
    """How far the losses of each way are from those of one device."""
    table = Table(
        Column("way"),
        Column("workers", right=True),
        Column("steps", right=True),
        Column("first\nloss", right=True),
        Column("last\nloss", right=True),
        Column("largest difference\nto one device", right=True),
    )
    for each in compared:
        table.add(
            each.way,
            str(each.workers),
            str(each.steps),
            f"{each.first:.9f}",
            f"{each.last:.9f}",
            f"{each.difference:.1e}",
        )
    return [table]


def speed_texts(speeds: Sequence[Speed]) -> Texts:
    """A row per way, a column per number of workers."""
    counts = sorted({speed.workers for speed in speeds})
    plural = {count: f"{count} worker{'s' * (count > 1)}" for count in counts}
    table = Table(
        Column("way"),
        *(Column(plural[count], "samples/s", right=True) for count in counts),
        *(Column(f"{count} to 1", right=True) for count in counts[1:]),
    )
    for way in dict.fromkeys(speed.way for speed in speeds):
        of_way = {speed.workers: speed.samples_per_second for speed in speeds if speed.way == way}
        rates = [f"{of_way[count]:,.0f}" if count in of_way else None for count in counts]
        gains = [f"{of_way[count] / of_way[counts[0]]:.2f}" if count in of_way else None for count in counts[1:]]
        table.add(way, *map(cell, [*rates, *gains]))
    return [table]


def utilisation_texts(ways: Mapping[str, Sequence[Use]]) -> Texts:
    """The share of a step in which each device computes: a row per way, a column per device or rank."""
    count = max(map(len, ways.values()))
    table = Table(Column("way"), *(Column(f"device {number}", "%", right=True) for number in range(count)))
    for way, devices in ways.items():
        shares = [f"{100 * device.computing:.0f}" for device in devices]
        table.add(way, *map(cell, [*shares, *(count - len(shares)) * [None]]))
    return [table]


def memory_texts(ways: Mapping[str, Sequence[Held]], settings: BertSettings) -> Texts:
    """A bar per device and way, and what stands for what."""
    rows = [
        (f"{way}, {name_device(way, number, each.device)}", each.held)
        for way, devices in ways.items()
        for number, each in enumerate(devices)
    ]
    labels = list(dict.fromkeys(label for _, held in rows for label in held))
    table = Table(Column("device"), *(Column(label.replace(" ", "\n"), "bytes", right=True) for label in labels))
    for name, held in rows:
        table.add(name, *(f"{held.get(label, 0):,}" for label in labels))
    about = (
        f"  A batch of {settings.batch_size} pairs, padded to {settings.max_length} tokens. Gradients are those of "
        f"parameters and, on the way back through the layers, of activations; optimizer state: Adam's two moments."
    )
    return [about, *bars(rows, labels, width=30), "", table]


def name_device(way: str, number: int, device: str) -> str:
    """A device of the one process, or the rank that has it."""
    return f"rank {number}" if way == DDP else device


def largest_texts(found: Sequence[LargestBatch], settings: BertSettings) -> Texts:
    """The largest batch by each way."""
    table = Table(
        Column("way"),
        Column("workers", right=True),
        Column("largest\nbatch", right=True),
        Column("fullest\ndevice"),
        Column("holds", "bytes", right=True),
    )
    for each in found:
        fullest = "every rank's" if each.way == DDP else each.fullest
        table.add(each.way, str(each.workers), str(each.batch_size), fullest, f"{each.peak:,}")
    about = (
        f"  Memory cap: {format_bytes(settings.memory_cap)} for each device; every pair is padded to "
        f"{settings.max_length} tokens."
    )
    return [about, table]


def ready_texts(parts: Sequence[PartReady], settings: BertSettings) -> Texts:
    """A row per part of the model, in the order in which backward has its gradients."""
    total = sum(part.bytes for part in parts)
    table = Table(
        Column("part of the model"),
        Column("gradients", "bytes", right=True),
        Column("of all", "%", right=True),
        Column("ready after", "% of backward", right=True),
    )
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
    table = Table(
        Column("gradients by"), Column("messages", right=True), Column("sent", "bytes", right=True),
        Column("early", "%", right=True), Column("step", "ms", right=True), Column("exposed", "ms", right=True),
        Column("alone", "ms", right=True), Column("hidden", "%", right=True), Column("distance\nto ddp", right=True),
    )  # fmt: skip
    for each in found:
        table.add(
            each.way, str(each.messages), f"{each.bytes:,}", f"{100 * each.early_bytes / each.bytes:.0f}",
            f"{1000 * each.seconds:.1f}", f"{1000 * each.exposed:.2f}", f"{1000 * each.alone:.2f}",
            f"{100 * each.hidden:.0f}", f"{each.difference_to_ddp:.1e}" if each.difference_to_ddp else "0",
        )  # fmt: skip
    about = (
        f"  Per step and rank, in buckets of {format_bytes(settings.bucket_cap)}. early: the share that leaves before "
        f"the last gradient is ready, as nothing else can be hidden; exposed: from the last gradient to the last "
        f"average; alone: the same averaging without a backward."
    )
    return [about, table, *(f"  {each.way}: {each.caveat}." for each in found if each.caveat)]


LESSON = LESSONS["bert"]
TRAIN, SAME_LOSSES = LESSON.remote("train"), LESSON.remote("same_losses")
TRAIN_ON = LESSON.remote("train", "resumable")
SPEED, UTILISATION = LESSON.remote("speed", "measure"), LESSON.remote("utilisation", "measure")
MEMORY, LARGEST = LESSON.remote("memory", "measure"), LESSON.remote("largest", "measure")
READY, AVERAGING = LESSON.remote("ready", "measure"), LESSON.remote("averaging", "measure")
WORKERS = (1, 2, 4)
"""On how many the speed is measured."""


@dataclass(frozen=True)
class Runner:
    """Runs a part on the processes that it needs, and says what came of it."""

    session: Session
    bar: Bar
    settings: BertSettings
    ways: tuple[str, ...]
    """Those that were asked for."""
    survival: SnapshotOptions
    """Of training; the other parts are short."""

    def run(self, code: Remote, settings: BertSettings) -> Any:
        """What each rank returned, in a world with as many ranks as the way takes."""
        return self.new_world(code, settings).run(RUN_TRAINING, code, settings, on_report=self.bar)

    def train(self, settings: BertSettings, on_report: Callable[[int, Event], None]) -> Training:
        """Training by one way, with snapshots and restarts if they are asked for."""
        restarts = self.survival.restarts
        world = self.new_world(TRAIN, settings, restarts)
        snapshots = self.snapshots_of(settings.way)
        code, more = (TRAIN_ON, (snapshots,)) if snapshots else (TRAIN, ())
        with resumable_if_preempted(self.session, self.survival, snapshots.folder if snapshots else None):
            results = world.run(
                RUN_TRAINING, code, settings, more, on_report=on_report, on_restart=echo_restarts(restarts),
                grace=self.survival.grace_of_ranks,
            )  # fmt: skip
        result: Training = results[0]
        return result

    def new_world(self, code: Remote, settings: BertSettings, restarts: int = 0) -> World:
        """The world that was joined, or one with as many ranks as the way takes."""
        world = self.session.world
        self.bar.show(f"{code.name.replace('_', ' ')}: {settings.way}, {settings.workers} workers")
        if world.rank_env:
            return world
        return World(
            settings.ranks,
            backend=world.backend,
            timeout=world.timeout,
            init_method=world.init_method,
            restarts=restarts,
            around=world.around,
        )

    def snapshots_of(self, way: str) -> SnapshotSettings | None:
        """Where a way has its snapshots: of several, each has a folder of its own in the one that was asked for."""
        settings = self.survival.settings
        if settings is None or len(self.ways) == 1:
            return settings
        return replace(settings, folder=settings.folder / way)

    def run_ways(self, code: Remote) -> dict[str, Any]:
        """The same for each way."""
        return {way: self.run(code, self.settings.on(way)) for way in self.ways}

    def say(self, code: Remote, texts: Texts) -> None:
        self.session.say(*part_texts(code, texts))


def train(runner: Runner) -> list[Training]:
    """Train by each way, and show how far it has come while it does."""
    runner.say(TRAIN, [TRAINING_LEGEND])
    rows = runner.session.rows(*PROGRESS)
    shown, notices = dict.fromkeys(runner.ways, 0), NoticePrinter()

    def on_report(rank: int, event: Event) -> None:
        if rank == 0 and "resumed" in event:
            runner.session.say("  going on after step {total}".format(**event["resumed"]))
        if rank == 0 and "progress" in event and event["progress"].step > shown[event["progress"].way]:
            shown[event["progress"].way] = event["progress"].step  # a world that was restarted may report it again
            rows.say(*progress_cells(event["progress"]))
        notices(rank, event)
        runner.bar(rank, event)

    trainings = [runner.train(runner.settings.on(way), on_report) for way in runner.ways]
    runner.session.say("", training_table(trainings))
    return trainings


def same_losses(runner: Runner) -> object:
    """Compare the losses of each way with those of one device."""
    alone = runner.run(SAME_LOSSES, runner.settings.on("data-parallel", 1))[0]
    compared = compare_losses(alone, [ranks[0] for ranks in runner.run_ways(SAME_LOSSES).values()])
    runner.say(SAME_LOSSES, same_texts(compared))
    return compared


def speed(runner: Runner) -> list[Speed]:
    """Measure each way on 1, 2 and 4 workers, or as many of these as there are GPUs."""
    settings = runner.settings
    counts = [count for count in WORKERS if settings.batch_size % count == 0]
    found = [
        runner.run(SPEED, settings.on(way, count))[0]
        for way in runner.ways
        for count in counts
        if count <= settings.most_workers(way)
    ]
    runner.say(SPEED, speed_texts(found))
    return found


def utilisation(runner: Runner) -> object:
    """Each device's share of a step in which it computes."""
    found = join_ranks(runner.run_ways(UTILISATION))
    runner.say(UTILISATION, utilisation_texts(found))
    return found


def memory(runner: Runner) -> object:
    """What each device holds, and what that is."""
    found = join_ranks(runner.run_ways(MEMORY))
    runner.say(MEMORY, memory_texts(found, runner.settings))
    return found


def largest(runner: Runner) -> object:
    """The largest batch under the cap."""
    found = [ranks[0] for ranks in runner.run_ways(LARGEST).values()]
    runner.say(LARGEST, largest_texts(found, runner.settings))
    return found


def ready(runner: Runner) -> object:
    """When backward has which gradients."""
    found = runner.run(READY, runner.settings.on(DDP))[0]
    runner.say(READY, ready_texts(found, runner.settings))
    return found


def averaging(runner: Runner) -> object:
    """What averaging gradients costs in a step."""
    found = runner.run(AVERAGING, runner.settings.on(DDP))[0]
    runner.say(AVERAGING, averaging_texts(found, runner.settings))
    return found


def join_ranks(ways: dict[str, Any]) -> dict[str, list[Any]]:
    """By way, what was found of each device: all of one process, or one of each rank."""
    return {way: [each for rank in ranks for each in rank] for way, ranks in ways.items()}


PARTS: dict[str, Callable[[Runner], object]] = {
    "train": train, "same-losses": same_losses, "speed": speed, "utilisation": utilisation, "memory": memory,
    "largest": largest, "ready": ready, "averaging": averaging,
}  # fmt: skip
"""By the names that --only takes."""
OWN_WORLDS = ("same-losses", "speed")
"""Parts that need other numbers of ranks than the one that was asked for."""
OF_DDP = ("ready", "averaging")
"""Parts about ranks that average gradients, whatever the ways."""


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
            "--memory-cap": (self.memory_cap, LARGEST),
            "--report-every": (self.report_every, TRAIN),
            "--snapshots": (survival.snapshots, TRAIN),
            "--restarts": (survival.restarts, TRAIN),
        }
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
    world.warm_up(RUN_TRAINING, TRAIN, TRAIN_ON, SPEED)
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
