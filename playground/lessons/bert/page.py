"""The command `bert`: its settings, the parts of the lesson, what each runs, on how many workers,
and its text. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from playground.console.options import flags, pack_options
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, bars, figures, numbers, tabulate
from playground.console.text import Prose, good, heading, prose
from playground.console.training import DIVERGED, RUN_TRAINING, DataOptions
from playground.console.units import format_bytes, plural
from playground.lessons import LESSONS
from playground.lessons.bert.prepare import DATASETS, MAX_LENGTH, PairsSource, prepare_pairs
from playground.lessons.bert.pretrained import BASE, SCRATCH, Tokenizer, load_pretrained
from playground.lessons.bert.sizes import BertSizes
from playground.runtime import host
from playground.runtime.backends import get_backend
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_at_least_one, check_choice, check_flags, flag, like
from playground.runtime.launcher.entry import CommandWorld
from playground.runtime.remote import Remote
from playground.training.formulas import kept_bytes
from playground.training.grad_syncs import DDP, GRAD_SYNCS, SPARSE
from playground.training.one_process import check_counts
from playground.training.results import replicas_verdict
from playground.training.settings import BFLOAT16, BUCKET_CAP, FLOAT32, MemorySettings

WAYS = ("data-parallel", "loss-in-forward", DDP)
"""The first two drive all devices from one process; in the last each rank has one."""
EXACT_STEPS = 20
"""How many losses are compared in float64."""
LOSSES_TO_COMPARE = 10
"""Number of steps over which the last loss that is shown is a mean."""


@dataclass(frozen=True, kw_only=True)
class BertSettings:
    """Raises `UsageError` for what cannot be trained."""

    folder: Path
    """The tokenised pairs."""
    config: BertSizes
    weights: str = SCRATCH
    """The name or the folder of pretrained ones, or `SCRATCH`."""
    workers: int
    """Devices of one process, or ranks with a device each."""
    device_type: str = "cpu"
    device_count: int = 0
    """How many devices one process can drive here; 0 for any number."""
    threads: int = 1
    """Cores that a device of the CPU stands for."""
    way: str = DDP
    """One of `WAYS`."""
    batch_size: int = flag(64, "Global batch size: pairs per step, over all workers.", least=1)
    steps: int = flag(300, "Steps to train.", least=1)
    lr: float = flag(1e-3, "Learning rate of Adam.", least=0)
    max_length: int = flag(MAX_LENGTH, "Tokens that a pair is cut to.", least=5)
    sync: str = flag(
        SPARSE,
        f"Rung of the ladder that averaging measures beside ddp: {SPARSE}, "
        f"{', '.join(GRAD_SYNCS)}.",
        choices=(SPARSE, *GRAD_SYNCS),
        metavar="NAME",
    )
    dtype: str = like(MemorySettings, "dtype")
    checkpoint_activations: bool = like(MemorySettings, "checkpoint_activations")
    double: bool = False
    """Whether to compute in float64."""
    seed: int = 1234

    def __post_init__(self) -> None:
        check_choice("way", self.way, WAYS)
        check_at_least_one(self, "workers", "threads")
        check_flags(self)
        if self.batch_size % self.workers:
            asked = f"--batch-size {self.batch_size} for {self.workers} workers"
            why = "DistributedSampler gives all ranks equally many samples"
            raise UsageError(f"{asked}: {why}, so choose a multiple of {self.workers}")
        if self.max_length > (most := self.config.max_length):
            raise UsageError(
                f"--max-length {self.max_length}: the model has {most} positions, choose no more"
            )

    @property
    def bucket_cap(self) -> int:
        """Bytes of a bucket of gradients: DistributedDataParallel's default, or a quarter of the
        gradients if less."""
        return min(BUCKET_CAP, self.config.parameters)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(f"{self.device_type}:{number}" for number in range(self.workers))

    @property
    def ranks(self) -> int:
        """Number of processes this way takes."""
        return self.workers if self.way == DDP else 1

    def on(self, way: str, workers: int | None = None) -> BertSettings:
        """The same training by another way, on as many workers or on others. Where one process can
        drive fewer, on as many of those as share a batch equally."""
        most = min(workers or self.workers, self.most_workers(way))
        return replace(
            self,
            way=way,
            workers=next(each for each in range(most, 0, -1) if self.batch_size % each == 0),
        )

    def most_workers(self, way: str) -> int:
        """The largest number of workers: any number of virtual devices, as many ranks on GPUs as
        were asked for, and as many GPUs of one process as there are."""
        if not self.device_count:
            return self.batch_size
        return self.workers if way == DDP else min(self.workers, self.device_count)

    @property
    def exact(self) -> BertSettings:
        """Few steps of the same training, in float64 and without dropout: what then differs is
        rounding."""
        config = replace(self.config, dropout=0.0)
        return replace(self, double=True, dtype=FLOAT32, config=config, steps=EXACT_STEPS)

    def expect_kept(self, *, recompute: bool) -> int:
        """Bytes that autograd keeps for backward of a batch, in float32 and without dropout: the
        layers' activations, the input of the first norm, and what the pooler takes its token
        from."""
        tokens, width = self.batch_size * self.max_length, self.config.width
        layers = kept_bytes(tokens, width, self.config.layers, 4, recompute=recompute)
        return round(layers) + 2 * 4 * tokens * width

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(
                f"--batch-size {self.batch_size}: there are {samples} pairs to train on, choose no "
                "more"
            )

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank."""
        return asdict(self)


EXACT = 1e-12
"""How far losses in float64 may be apart: that much is rounding."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A training by one way."""

    way: str
    workers: int
    losses: list[float]
    """Those of all ranks together, before each step."""


@dataclass(frozen=True, kw_only=True)
class BertTraining(Losses):
    """A training, and its test."""

    tested: int
    """Pairs in the test set."""
    seconds: float
    samples_per_second: float
    test_accuracy: float | None
    """None where training diverged: it is then that of a guess."""
    replicas_max_difference: float
    """The largest difference of any parameter between a rank and rank 0."""


@dataclass(frozen=True, kw_only=True)
class ComparedLosses:
    """A training beside that of one device."""

    way: str
    workers: int
    steps: int
    first: float
    last: float
    difference: float
    """The largest of any loss."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    way: str
    workers: int
    seconds: float
    """For a step: the median."""
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a device when it holds most."""

    device: str
    peak: int
    """Bytes."""
    held: dict[str, int]
    """The same bytes by what they are for."""


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """Bytes that autograd keeps for backward of a batch on one device."""

    kept: int
    closed_form: int | None
    """None with dropout, whose masks depend on the device, in bfloat16, of which autocast keeps
    casts beside float32, or for layers of another shape than the formula's."""
    in_float32: int
    """The closed form of a training that keeps all."""


@dataclass(frozen=True, kw_only=True)
class AveragingCost:
    """The cost of averaging gradients in a step, one way: figures of the ladder's rung."""

    way: str
    seconds: float
    """For a step: the median."""
    exposed: float
    """Seconds from the last gradient to the last average."""
    alone: float
    """Seconds of the same averaging without a backward."""
    hidden: float
    """Share of `alone` that is not exposed, from 0 to 1."""
    messages: int
    bytes: int
    """Sent by a rank."""
    early_bytes: int
    """Those that leave before the last gradient is ready."""
    difference_to_ddp: float
    """The largest of any parameter, after all steps."""
    caveat: str
    """Why `hidden` is less than it could be; empty otherwise."""


def compare_losses(alone: Losses, others: Sequence[Losses]) -> list[ComparedLosses]:
    """How far each training is from `alone`. Raises `PlaygroundError` if it is by more than
    rounding, or if a loss is no finite number, which nothing can be compared with."""
    result = []
    for other in others:
        name = f"{other.way} on {other.workers} workers"
        if not all(map(math.isfinite, (*alone.losses, *other.losses))):
            raise PlaygroundError(f"{name}: {DIVERGED}")
        pairs = zip(alone.losses, other.losses, strict=True)
        difference = max(abs(one - two) for one, two in pairs)
        if not difference <= EXACT:
            raise PlaygroundError(
                f"{name}: its losses are up to {difference:.2g} from those of one device, "
                f"where rounding makes less than {EXACT:g}"
            )
        result.append(
            ComparedLosses(
                way=other.way,
                workers=other.workers,
                steps=len(other.losses),
                first=other.losses[0],
                last=other.losses[-1],
                difference=difference,
            )
        )
    return result


WAY = {"way": Column("way")}
TRAINING = WAY | figures(
    ("workers",), ("first", "first\nloss", "", ".4f"), ("last", "last\nloss", "", ".4f"),
    ("test_accuracy", "test\naccuracy", "%", ".2f", 100), ("samples_per_second", "speed",
    "samples/s", ",.0f"),
    ("seconds", "time", "s", ".1f"),
)  # fmt: skip
SAME_LOSSES_COLUMNS = WAY | figures(
    ("workers",), ("steps",), ("first", "first\nloss", "", ".9f"), ("last", "last\nloss", "",
    ".9f"),
    ("difference", "largest difference\nto one device", "", ".1e"),
)  # fmt: skip
AVERAGING_COLUMNS = {"way": Column("gradients by")} | figures(
    ("messages",), ("bytes", "sent", "bytes", ","), ("early", "early", "%", ".0f", 100),
    ("seconds", "step", "ms", ".1f", 1000), ("exposed", "exposed", "ms", ".2f", 1000),
    ("alone", "alone", "ms", ".2f", 1000), ("hidden", "hidden", "%", ".0f", 100),
    ("difference", "distance\nto ddp", "", ".1e"),
)  # fmt: skip


def speed_texts(speeds: Sequence[Speed], settings: BertSettings) -> Texts:
    rates = {(speed.way, speed.workers): speed.samples_per_second for speed in speeds}
    counts = sorted({count for _, count in rates})
    rates_by = [(plural(count, "worker"), "samples/s", ",.0f") for count in counts]
    table = Table(
        "way", *numbers(*rates_by, *((f"{count} to 1", "", ".2f") for count in counts[1:]))
    )
    for way in dict.fromkeys(way for way, _ in rates):
        of_way = [rates.get((way, count)) for count in counts]
        table.add(way, *of_way, *(rate and rate / rates[way, counts[0]] for rate in of_way[1:]))
    return [table]


def memory_texts(ways: Mapping[str, Sequence[DeviceMemory]], settings: BertSettings) -> Texts:
    """A bar per device and way."""
    rows = [
        (f"{way}, {f'rank {number}' if way == DDP else each.device}", each.held)
        for way, devices in ways.items()
        for number, each in enumerate(devices)
    ]
    labels = list(dict.fromkeys(label for _, held in rows for label in held))
    about = (
        f"  A batch of {settings.batch_size} pairs, padded to {settings.max_length} tokens. "
        "Gradients are those of parameters and, on the way back through the layers, of "
        "activations; optimizer state: Adam's two moments."
    )
    return [about, *bars(rows, labels, width=30)]


def averaging_texts(found: Sequence[AveragingCost], settings: BertSettings) -> Texts:
    """A row per way to average."""
    rows = (
        {
            **vars(each),
            "early": each.early_bytes / max(1, each.bytes),
            "difference": each.difference_to_ddp or "0",
        }
        for each in found
    )
    about = (
        f"  Per step and rank, in buckets of {format_bytes(settings.bucket_cap)}. early: the share "
        "that leaves before the last gradient is ready, as nothing else can be hidden; exposed: "
        "from the last gradient to the last average; alone: the same averaging without a backward."
    )
    caveats = [f"  {each.way}: {each.caveat}." for each in found if each.caveat]
    return [about, tabulate(rows, AVERAGING_COLUMNS), *caveats]


def kept_texts(kept: Sequence[KeptActivations], settings: BertSettings) -> Texts:
    """Raises `PlaygroundError` for other bytes than those of the closed form."""
    [found] = kept
    is_smaller = settings.dtype == BFLOAT16 or settings.checkpoint_activations
    if found.closed_form is not None:
        forms = {"kept": found.closed_form}
        check_counts("activations", vars(found), forms, settings.device_type)
    form = "" if found.closed_form is None else f", closed form {format_bytes(found.closed_form)}"
    whole = f"; all of them in float32: {format_bytes(found.in_float32)}" if is_smaller else ""
    about = f"  {format_bytes(found.kept)}{form}{whole}, for {settings.batch_size} pairs of "
    return [f"{about}{settings.max_length} tokens on one device."]


LESSON = LESSONS["bert"]
TRAIN, SAME_LOSSES = (LESSON.remote(name, "experiment") for name in ("train", "same_losses"))
SPEED, MEMORY, ACTIVATIONS, AVERAGING = (
    LESSON.remote(name, "measure") for name in ("speed", "memory", "activations", "averaging")
)
WORKERS = (1, 2, 4)
"""Numbers of workers on which the speed is measured."""


def run(session: Session, code: Remote, settings: BertSettings) -> Any:
    session.bar.show(f"{code.name.replace('_', ' ')}: {settings.way}, {settings.workers} workers")
    config, around = session.world.config, session.world.around
    world = CommandWorld(
        settings.ranks, around=around, backend=config.backend, timeout=config.timeout
    )
    return world.run(RUN_TRAINING, code, settings, on_report=session.bar)


def train(session: Session, settings: BertSettings, ways: Sequence[str]) -> list[BertTraining]:
    """Train by each way. What has diverged has learnt nothing, so its accuracy, that of a guess, is
    left out."""
    found = list[BertTraining]()
    for way in ways:
        training: BertTraining = run(session, TRAIN, settings.on(way))[0]
        if not all(map(math.isfinite, training.losses)):
            click.echo(f"{way}: {DIVERGED}", err=True)
            training = replace(training, test_accuracy=None)
        found.append(training)
    return found


def training_texts(trainings: Sequence[BertTraining], settings: BertSettings) -> Texts:
    rows = (
        {**vars(each), "first": each.losses[0], "last": fmean(each.losses[-LOSSES_TO_COMPARE:])}
        for each in trainings
    )
    return [tabulate(rows, TRAINING)]


def same_losses(
    session: Session, settings: BertSettings, ways: Sequence[str]
) -> list[ComparedLosses]:
    """Compare the losses of each way with those of one device."""
    alone, *others = (settings.on("data-parallel", 1), *(settings.on(way) for way in ways))
    return compare_losses(
        run(session, SAME_LOSSES, alone)[0], [run(session, SAME_LOSSES, each)[0] for each in others]
    )


def speeds(session: Session, settings: BertSettings, ways: Sequence[str]) -> list[Speed]:
    """Measure each way on 1, 2 and 4 workers, or as many of these as there are GPUs."""
    counts = [count for count in WORKERS if settings.batch_size % count == 0]
    pairs = [
        (way, count) for way in ways for count in counts if count <= settings.most_workers(way)
    ]
    return [run(session, SPEED, settings.on(*pair))[0] for pair in pairs]


def memory(
    session: Session, settings: BertSettings, ways: Sequence[str]
) -> dict[str, list[DeviceMemory]]:
    """By way, the memory of each device: of all devices of one process, or of that of each rank."""
    return {way: list(chain(*run(session, MEMORY, settings.on(way)))) for way in ways}


PARTS: dict[str, tuple[Remote, Callable[..., Any], Callable[..., Texts]]] = {
    "train": (TRAIN, train, training_texts),
    "same-losses": (
        SAME_LOSSES,
        same_losses,
        lambda compared, _: [tabulate(compared, SAME_LOSSES_COLUMNS)],
    ),
    "speed": (SPEED, speeds, speed_texts),
    "memory": (MEMORY, memory, memory_texts),
    "activations": (
        ACTIVATIONS,
        lambda session, asked, _: run(session, ACTIVATIONS, asked.on("data-parallel", 1)),
        kept_texts,
    ),
    "averaging": (
        AVERAGING,
        lambda session, asked, _: run(session, AVERAGING, asked.on(DDP))[0],
        averaging_texts,
    ),
}
"""By the names that --only takes: what ranks run, what runs it, and what shows the results."""
ENCODER = ("transformers.models.bert.modeling_bert",)
"""Imports of ranks that load pretrained weights."""
WORKERS_AT_LEAST = 2
"""One device gets as many cores as each of two, so that the two can be twice as fast."""


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """The options of `bert` beside its settings."""

    ways: tuple[str, ...] = flag(WAYS, "How to train", name="--way", choices=WAYS)
    only: tuple[str, ...] = flag((), "Run only these parts", choices=PARTS)
    weights: str = flag(
        SCRATCH,
        f"Pretrained weights, through transformers: a model on the hub, such as {BASE}, or a "
        "folder.",
        metavar=f"{SCRATCH}|NAME|DIR",
    )
    dataset: str = flag(
        DATASETS[0],
        "generated: sentence pairs from a small grammar; multinli: MultiNLI from the hub, through "
        "datasets.",
        choices=DATASETS,
    )
    data_dir: Path | None = like(
        DataOptions, "data_dir", help="Directory where tokenised pairs are put."
    )
    dropout: float | None = flag(
        None,
        "Probability that dropout zeroes a feature.",
        least=0,
        below=1,
        shown_default="0, pretrained as published",
    )


@LESSON.run_by(
    pack_options("asked", BertOptions),
    flags(
        BertSettings,
        *("steps", "batch_size", "lr", "max_length", "dtype", "checkpoint_activations", "sync"),
    ),
)
def command(session: Session, asked: BertOptions, **chosen: Any) -> None:
    world = session.world
    if world.rank_env:
        raise UsageError(
            f"{LESSON.name} starts worlds of its own: run it without torchrun, RANK and WORLD_SIZE"
        )
    without = "" if DDP in asked.ways else AVERAGING.name
    if without in asked.only:
        raise UsageError(
            f"--only {without} is about ranks that average gradients: leave out --way "
            f"{','.join(asked.ways)}"
        )
    world.warm_up(RUN_TRAINING, TRAIN, SPEED, *(ENCODER if asked.weights != SCRATCH else ()))
    config: BertSizes | None = None
    tokenizer: Tokenizer | None = None
    if asked.weights != SCRATCH:
        session.bar.announce(f"loading {asked.weights} and its tokenizer")
        config, tokenizer = load_pretrained(asked.weights)
    pairs = prepare_pairs(
        asked.dataset, asked.data_dir, tokenizer, session.bar.announce, chosen["max_length"]
    )
    settings = make_settings(asked, config, pairs, world, seed=session.run.seed, **chosen)
    settings.check_samples(pairs.train)
    if settings.checkpoint_activations and settings.config.dropout and asked.ways != (DDP,):
        raise UsageError(
            f"--checkpoint-activations with a dropout of {settings.config.dropout:g}: replicas of "
            f"one process draw from one generator, so that none can draw a mask again; choose "
            f"--dropout 0 or --way {DDP}"
        )
    session.say(*header(session, settings, pairs))
    found = dict[str, list[Any] | dict[str, list[DeviceMemory]]]()
    for name in (name for name in PARTS if name in (asked.only or PARTS) and name != without):
        code, find, texts = PARTS[name]
        found[name] = find(session, settings, asked.ways)
        about = prose(heading(code.name.replace("_", " ")), f": {code.summary}")
        session.say("", about, *texts(found[name], settings))
    session.say("", ending(session, [*found.get("train", ())], found))
    recipe = {
        "weights": settings.weights,
        "model": settings.config,
        "batch_size": settings.batch_size,
    }
    data = {"dataset": pairs.name, "train": pairs.train, "test": pairs.test}
    session.print_document({}, **recipe, **data, parts=found)


def make_settings(
    asked: BertOptions,
    pretrained: BertSizes | None,
    pairs: PairsSource,
    world: CommandWorld,
    **chosen: Any,
) -> BertSettings:
    """The settings asked for, and the world's devices. Raises `UsageError`."""
    length = max(BertSizes.max_length, chosen["max_length"])
    config = pretrained or BertSizes(vocabulary=pairs.vocabulary, max_length=length, dropout=0.0)
    if asked.dropout is not None:
        config = replace(config, dropout=asked.dropout)
    return BertSettings(
        folder=pairs.folder, config=config, weights=asked.weights, workers=world.size,
        device_type=world.device,
        device_count=get_backend(world.backend).count_devices(),
        threads=host.threads_per_rank(max(world.size, WORKERS_AT_LEAST)), **chosen,
    )  # fmt: skip


def header(session: Session, settings: BertSettings, pairs: PairsSource) -> list[str]:
    config, count = settings.config, settings.workers
    origin = "from scratch" if settings.weights == SCRATCH else f"pretrained: {settings.weights}"
    size = f"{config.parameters:,} parameters ({format_bytes(4 * config.parameters)})"
    return [
        f"{LESSON.name}: {session.world.backend} on {session.world.device}, "
        f"{plural(count, 'worker')}: devices of one process, or ranks with a device each",
        f"model: {config.layers} layers of width {config.width}, {size}, {origin}",
        f"data: {pairs}",
        f"training: {settings.steps} steps of {settings.batch_size} pairs, Adam, learning rate "
        f"{settings.lr:g}",
    ]


def ending(session: Session, trainings: Sequence[BertTraining], parts: Iterable[str]) -> Prose:
    """The last line: the speeds, if any way has trained, and else the names of the parts. Raises
    `PlaygroundError` if the replicas of ddp are no longer one model."""
    speeds = ", ".join(f"{each.way} {each.samples_per_second:,.0f}" for each in trainings)
    differences = [each.replicas_max_difference for each in trainings if each.way == DDP]
    verdict = [part for each in differences for part in ("; ", good(replicas_verdict(each)))]
    shown = LESSON.conclude(
        session.world.size, found=f"pairs per second: {speeds}" if speeds else ", ".join(parts)
    )
    return prose(f"Shown: {shown}", *verdict, ".")
