"""The command `data-parallel`: its settings, results and text. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import click

from playground.console import plots
from playground.console.options import RunOptions, flags, memory_cap_option, only_with, plot_option
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, bars, numbers
from playground.console.text import heading, prose
from playground.console.training import RUN_TRAINING, EpochPrinter
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.runtime.backends import backend_for
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_choice, check_flags, flag, flags_of
from playground.runtime.launcher import server
from playground.runtime.launcher.entry import World
from playground.runtime.remote import Remote
from playground.training.results import TrainingResult
from playground.training.settings import TrainingSettings

MAX_DEVICES, MAX_BATCH_SIZE = 64, 256
OPTIMIZERS = ("sgd", "adam")
WAYS = ("logits", "loss", "outputs")
"""Ways to the loss, named after what the devices compute and, all but the last, send to one of them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to the loss."""

    gather: str
    """One of `WAYS`. "outputs" stay where they are: only their losses are gathered."""
    output_device: str
    """Where the loss ends up."""

    def __post_init__(self) -> None:
        check_choice("gather", self.gather, WAYS)


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """Raises `UsageError` for what cannot be run. (Whether the devices exist is for `resolve_devices` to say.)"""

    devices: tuple[str, ...]
    """As torch calls them: cpu:0, cpu:1, … or cuda:0, cuda:1, … The model lies on the first."""
    output_device: str
    """One of them, where `one_step` gathers."""
    ways: tuple[Way, ...] = ()
    """To be compared."""
    batch_size: int = flag(32, "Number of samples per step.", least=1, most=MAX_BATCH_SIZE)
    steps: int = flag(3, "Number of steps to time.", least=1)
    optimizer: str = flag(
        "sgd", "Whether the optimizer keeps nothing (sgd) or two numbers per parameter (adam).", choices=OPTIMIZERS
    )
    seed: int = 1234

    def __post_init__(self) -> None:
        check_device_count(len(self.devices))
        names = ",".join(self.devices)
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(f"--devices {names}: a device named twice would count twice, name each once")
        for device in (self.output_device, *(way.output_device for way in self.ways)):
            if device not in self.devices:
                names = ", ".join(self.devices)
                raise UsageError(f"output device {device} is none of the devices {names}: choose one of them")
        check_flags(self)

    @property
    def on_first_device(self) -> DataParallelSettings:
        """One step of the same training on the first device alone."""
        first = self.devices[0]
        alone = (Way(gather="logits", output_device=first),)
        return replace(self, devices=(first,), output_device=first, ways=alone, steps=1)


def check_device_count(count: float) -> None:
    """Raise `UsageError` for more devices than a host has threads and processes for."""
    if count > MAX_DEVICES:
        raise UsageError(f"--devices {count:g}: at most {MAX_DEVICES}, each has a thread and a process here")


def ways_to_compare(devices: tuple[str, ...], gather: str | None, output_device: str | None) -> tuple[Way, ...]:
    """The one way that is asked for or, if `gather` is None, the usual one and its three cures."""
    if gather:
        return (Way(gather=gather, output_device=output_device or devices[0]),)
    elsewhere = output_device or devices[min(1, len(devices) - 1)]
    places = [*((way, devices[0]) for way in WAYS), ("logits", elsewhere)]
    return tuple(Way(gather=way, output_device=device) for way, device in dict.fromkeys(places))


LABELS = ("parameters", "gradients", "optimizer state", "activations", "gathered outputs", "inputs", "other")
"""Kinds of what a device holds; "other" on GPUs only, where the allocator knows of more than tensors."""
PARTS = ("scatter", "replicate", "parallel_apply", "gather", "loss", "backward", "optimizer.step")
"""The parts of a training step, in order."""
MOVES = {"backward": ("gradients of outputs", "reduce")}
"""The copies that belong to a part, unless they are called like it."""

Shares = dict[str, str | int]
"""A device's name under "device", and its samples by batch and number of devices, as in "30 on 2"."""
Received = TypedDict("Received", {"part": str, "from": str, "bytes": int})
"""The copies of a part of a training step from one device, or "host", to another."""
MEANS = ("mean", "mean of means", "weighted mean")
"""Means of a batch's losses: over all samples, over the chunks' means, and over those weighted by the chunks' sizes."""
Means = dict[str, Any]
"""The number of "samples", the sizes of "chunks", the "means" of the losses of each, and `MEANS`."""


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A training step as one device sees it."""

    device: str
    held: dict[str, int]
    """Bytes in its memory after each part of the step; "(before)" comes first."""
    received: list[Received]


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """The load of a step on one device: the most bytes it holds at any moment, these by label, and the share of the
    step in which it computes, 0 to 1."""

    device: str
    peak: int
    at_peak: dict[str, int]
    share: float


@dataclass(frozen=True, kw_only=True)
class WayResult(Way):
    """The cost of a step by one way to the loss: the loss before it, the bytes that gather copies from other devices,
    and the median time."""

    loss: float
    gathered: int
    devices: list[DeviceLoad]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LargestBatch(Way):
    """The largest batch with which no device holds more than the cap, by one way to the loss; the device that holds
    most then, and its bytes by label."""

    devices: int
    batch: int
    fullest: str
    at_peak: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ModelCopy:
    """The bytes of parameters on one device while replicas run, and how many `of` all are the model's own memory."""

    device: str
    parameters: int
    shared: int
    of: int


@dataclass(frozen=True, kw_only=True)
class ReplicaStep:
    """A training step of DataParallel, beside the same step on one device."""

    step: int
    loss: float
    replicas_differ: float
    """Largest difference of a replica's parameters from the first replica's, in forward."""
    gradients_differ: float
    """Largest difference of the gradients that a replica contributes from those of the first."""
    from_one_device: float
    """Largest difference between the model's parameters and those of training on one device, after the step."""


@dataclass(frozen=True, kw_only=True)
class DeviceTraffic:
    """Bytes of model and gradients that a device sends and receives in a step."""

    device: str
    sent: int
    received: int


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The median time of the same step on one rank, where each has its own replica and gradients are averaged, and the
    bytes that it sends with our ring."""

    seconds: float
    sent: int


@dataclass(frozen=True, kw_only=True)
class WorkSeconds:
    """The median time of a piece of work: on one worker, a thread or a process (0 on a rank that waited meanwhile), and
    on several until each has done one."""

    alone: float
    together: float


def speedup(alone: float, together: float, workers: int) -> float:
    """How many times as much `workers` get done in the same time as one of them."""
    return workers * alone / together


def loss_difference(together: TrainingResult, alone: TrainingResult) -> float:
    """Difference of the last epoch's losses: float32 rounds sums by their order, and training amplifies that."""
    return abs(together.epochs[-1].loss - alone.epochs[-1].loss)


def split_texts(shares: Sequence[Shares]) -> Texts:
    """How many samples each device got."""
    rows = [tuple(map(str, share.values())) for share in shares]
    table = Table("device", *numbers(*list(shares[0])[1:]), rows=rows)
    return ["  inputs per device; 30 on 2: 30 inputs on 2 devices", table]


def step_texts(devices: Sequence[DeviceStep]) -> Texts:
    """The copies in each part of a step, and the bytes on each device after it."""
    moved = Table("part", "from", "to", *numbers(("moved", "bytes")))
    for name in PARTS:
        for part, device in product(MOVES.get(name, (name,)), devices):
            for move in device.received:
                if move["part"] == part:
                    moved.add(name, move["from"], device.device, f"{move['bytes']:,}")
    rows = [(name, *(f"{device.held[name]:,}" for device in devices)) for name in ("(before)", *PARTS)]
    held = Table("after", *numbers(*((device.device, "bytes") for device in devices)), rows=rows)
    return ["  What is copied between devices:", moved, "  What each device holds after each part:", held]


def ways_texts(ways: Sequence[WayResult], alone: WayResult) -> Texts:
    """Memory, time and utilisation of each way to the loss; `alone` is the same step on the first device only."""
    gathers, devices = ("gathered", "on"), [device.device for device in ways[0].devices]
    peaks = Table(*gathers, *numbers(*((device, "bytes") for device in devices)))
    shares = Table(*gathers, *numbers(*((device, "%") for device in devices)))
    costs = Table(*gathers, *numbers(("copied by\ngather", "bytes"), ("time\nper step", "ms"), "loss"))
    for way in ways:
        name = way.gather, way.output_device
        peaks.add(*name, *(f"{device.peak:,}" for device in way.devices))
        shares.add(*name, *(f"{100 * device.share:.0f}" for device in way.devices))
        costs.add(*name, f"{way.gathered:,}", f"{1000 * way.seconds:.1f}", f"{way.loss:.6f}")
    [first] = alone.devices
    return [
        f"  Peak memory of each device ({first.device} alone, with the whole batch: {first.peak:,} bytes):",
        peaks,
        f"  What that is where {ways[0].gather} are gathered on {ways[0].output_device}:",
        *bars([(device.device, device.at_peak) for device in ways[0].devices], LABELS),
        "  What gather copies from other devices, and how long a step takes:",
        costs,
        "  Share of a step in which each device computes:",
        shares,
    ]


def fitting_texts(batches: Sequence[LargestBatch], cap: int) -> Texts:
    """The largest batch by each way, and what the fullest device then holds."""
    figures = *numbers("largest\nbatch"), Column("fullest\ndevice"), *numbers(("holds", "bytes"))
    table = Table(*numbers("devices"), "gathered", "on", *figures)
    for each in batches:
        size = f"{each.batch}{'+' * (each.batch == MAX_BATCH_SIZE)}"
        held = f"{sum(each.at_peak.values()):,}"
        table.add(str(each.devices), each.gather, each.output_device, size, each.fullest, held)
    more = f"  + as large as this command's batches get: {MAX_BATCH_SIZE}"
    reached = any(each.batch == MAX_BATCH_SIZE for each in batches)
    return [f"  Each device may hold {cap:,} bytes:", table, *[more] * reached]


def claims_texts(models: Sequence[ModelCopy], compared: Sequence[ReplicaStep]) -> Texts:
    """Copies of the model on each device, and differences of replicas from each other and from one device."""
    rows = [(each.device, f"{each.parameters:,}", f"{each.shared} of {each.of} parameters") for each in models]
    copies = Table("device", *numbers(("parameters", "bytes")), "of its replica, the\nmodel's own memory", rows=rows)
    figures = "parameters of\nthe replicas", "their\ngradients", "the model, from\none device's"
    steps = Table(*numbers("step", "loss", *figures))
    for step in compared:
        apart = (step.replicas_differ, step.gradients_differ, step.from_one_device)
        steps.add(str(step.step), f"{step.loss:.6f}", *(f"{difference:.1g}" for difference in apart))
    return [
        "  The model lies on the first device once. What each device has while replicas run:",
        copies,
        "  Replicas are equal in every forward, as copies of one model, though their gradients are not: these are "
        "added up, and the model goes where one device would take it. Largest differences, in float64:",
        steps,
    ]


def means_texts(batches: Sequence[Means]) -> Texts:
    """The mean of the means and the weighted one, beside the mean over all samples."""
    wrapped = Column("chunks", wraps=True), Column("mean loss\nof each chunk", wraps=True)
    table = Table(*numbers("samples"), *wrapped, *numbers("mean", "mean of\nmeans", "weighted\nmean"))
    for means in batches:
        batch = (str(means[name]) for name in ("samples", "chunks", "means"))
        table.add(*batch, *(f"{means[name]:g}" for name in MEANS))
    return [table]


def copying_texts(copying: float, devices: Sequence[DeviceTraffic], ranks: Sequence[Averaging]) -> Texts:
    """DataParallel's steps, in seconds and traffic, beside the processes'."""
    busiest = max(devices, key=lambda device: device.sent + device.received)
    sent, by_a_rank = sum(device.sent for device in devices), max(rank.sent for rank in ranks)
    traffic = ("sent\nat most", "bytes"), ("received\nat most", "bytes"), ("sent\nin total", "bytes")
    table = Table("", *numbers(*traffic, ("time\nper step", "ms")))
    for name, *counts, seconds in (
        ("data-parallel", busiest.sent, busiest.received, sent, copying),
        (f"sgd -n {len(ranks)}", by_a_rank, by_a_rank, sum(r.sent for r in ranks), median(r.seconds for r in ranks)),
    ):
        table.add(name, *(f"{count:,}" for count in counts), f"{1000 * seconds:.1f}")
    about = (
        "  Bytes of the model and of gradients in a step; at most: by the device, or the rank, with the most traffic. "
        "The bytes of sgd are those of our ring; its time is that of the backend's all-reduce."
    )
    return [about, table]


def gil_texts(threads: Mapping[str, WorkSeconds], processes: Sequence[Mapping[str, WorkSeconds]]) -> Texts:
    """How many times as much is done at once, by threads and by processes."""
    table, count = Table("work", "by", *numbers(("alone", "ms"), ("together", "ms"), "speed-up")), len(processes)
    for name, work in threads.items():
        by_processes = processes[0][name].alone, median(rank[name].together for rank in processes)
        for workers, alone, together in (("threads", work.alone, work.together), ("processes", *by_processes)):
            gain = f"{speedup(alone, together, count):.2f}"
            table.add(name, workers, f"{1000 * alone:.1f}", f"{1000 * together:.1f}", gain)
    about = (
        f"  alone: one worker does one piece of work; together: {count} workers do one piece each at the same time; "
        f"speed-up: {count} x alone / together"
    )
    return [about, table]


def ending(devices: int) -> str:
    """Why the path goes on."""
    times = "once" if devices == 2 else f"{devices - 1} times"
    return (
        f"Why the path goes on to processes: in every step the first device sends the model {times} and "
        f"receives as many gradients, and more with more devices; in a ring no rank sends more than twice the model. "
        f"Threads take turns wherever Python itself is at work; processes do not. And one process is confined to one "
        f"machine."
    )


def plot_memory(ways: Sequence[WayResult], file: Path) -> None:
    """A bar per device, in a group per way to the loss."""
    figure, axes = plots.new_axes("memory of each device, at its peak", "", "MB")
    devices, groups = [device.device for device in ways[0].devices], range(len(ways))
    width = 0.8 / len(devices)
    for number, device in enumerate(devices):
        peaks = [way.devices[number].peak / 1e6 for way in ways]
        axes.bar([group + width * number for group in groups], peaks, width, label=device)
    middle = width * (len(devices) - 1) / 2
    axes.set_xticks([group + middle for group in groups], [f"{way.gather} on {way.output_device}" for way in ways])
    axes.legend()
    plots.save(figure, file)


LESSON = LESSONS["data-parallel"]
SPLIT, ONE_STEP, COMPARE, LARGEST, TWO_MEANS, CLAIMS = (
    LESSON.remote(name, "experiment")
    for name in ("split", "one_step", "ways", "largest_batches", "two_means", "claims")
)
COPYING, AVERAGING, THREADS, PROCESSES, TRAIN = (
    LESSON.remote(name, "experiment") for name in ("copying", "averaging", "threads", "processes", "run")
)
ABOUT_DEVICES = "Number of virtual devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:1."
ABOUT_EPOCHS = "With --train: passes over the data."


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@click.option("--devices", default="4", show_default=True, metavar="N|LIST", help=ABOUT_DEVICES)
@click.option("--gather", type=click.Choice(WAYS), help="What to gather. By default all are compared.")
@click.option("--output-device", metavar="DEVICE", show_default="the first device", help="Where to gather.")
@flags(DataParallelSettings)
@memory_cap_option
@click.option("--train", is_flag=True, help="Train as sgd does: on all devices, then on the first alone.")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help=ABOUT_EPOCHS)
@data_options
@flags(RunOptions, "timeout", "seed")
@plot_option("each device's memory")
@flags(RunOptions, "wide", "as_json", "see")
@only_with("epochs", "dataset", "data_dir", "mirror", "limit", train=(True,))
@only_with("gather", "output_device", "batch_size", "steps", "optimizer", "memory_cap", "plot", train=(False,))
def command(
    devices: str,
    gather: str | None,
    output_device: str | None,
    memory_cap: int | None,
    train: bool,
    epochs: int,
    data: DataOptions,
    plot: Path | None,
    **values: Any,
) -> None:
    server.preload(SPLIT.module)
    server.warm_up()
    names, output = resolve_names(devices, output_device)
    chosen = {name: values.pop(name) for name in flags_of(DataParallelSettings)}
    compared = ways_to_compare(names, gather, output)
    settings = DataParallelSettings(
        devices=names, output_device=output or names[0], ways=compared, seed=values["seed"], **chosen
    )
    run = RunOptions(backend=backend_for(names[0].partition(":")[0]).name, **values)
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    if session.world.rank_env:
        raise UsageError(f"{LESSON.name} starts its processes itself: run it without torchrun, RANK and WORLD_SIZE")
    if plot:
        plots.check(plot)
    batches: list[LargestBatch] = []
    if memory_cap:  # first, since it may be refused
        with session.bar() as bar:
            bar.show(LARGEST.name)
            [batches] = session.world.run(LARGEST, settings, memory_cap, on_report=bar)
    session.say(f"{LESSON.name}: one process, {len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    if train:
        compare_training(session, names, data, epochs)
    else:
        run_parts(session, settings, batches, memory_cap or 0, plot)


def resolve_names(devices: str, output_device: str | None) -> tuple[tuple[str, ...], str | None]:
    """The names of the devices, and of the one to gather on. Raises `UsageError` for those that do not exist."""
    # imports torch, at the same time as the ranks' server does
    from playground.lessons.data_parallel.machine import resolve_devices, resolve_output_device

    resolved = resolve_devices(list_devices(devices))
    output = None if output_device is None else resolve_output_device(output_device, resolved)
    return tuple(map(str, resolved)), output and str(output)


def list_devices(devices: str) -> list[str]:
    """The names that --devices stands for: a number of virtual devices, or a comma-separated list."""
    if devices.isdecimal():
        check_device_count(float(devices))  # before that many names are made
        return [f"cpu:{number}" for number in range(int(devices))]
    names = [name.strip() for name in devices.split(",")]
    if "" in names:
        raise UsageError(f"--devices {devices!r}: a name is missing, write cpu:0,cpu:1 or a number")
    return names


def run_parts(
    session: Session, settings: DataParallelSettings, batches: list[LargestBatch], cap: int, plot: Path | None
) -> None:
    """Run the parts of the lesson, and show each as soon as it has been run. `batches` have been found before."""
    world = session.world
    ranks = World(len(settings.devices), backend=world.backend, timeout=world.timeout, around=world.around)

    with session.bar() as bar:

        def run_on(where: World, part: Remote, *args: object) -> list[Any]:
            bar.show(part.name)
            return where.run(part, *args, on_report=bar)

        def show(part: Remote, texts: Texts) -> None:
            session.say("", prose(heading(part.name), f": {part.summary}"), *texts)

        [shares] = run_on(world, SPLIT, settings)
        show(SPLIT, split_texts(shares))
        [devices] = run_on(world, ONE_STEP, settings)
        show(ONE_STEP, step_texts(devices))
        [ways] = run_on(world, COMPARE, settings)
        [[alone]] = run_on(world, COMPARE, settings.on_first_device)
        show(COMPARE, ways_texts(ways, alone))
        if batches:
            show(LARGEST, fitting_texts(batches, cap))
        [means] = run_on(world, TWO_MEANS, settings)
        show(TWO_MEANS, means_texts(means))
        [(copies, steps)] = run_on(world, CLAIMS, settings)
        show(CLAIMS, claims_texts(copies, steps))
        [(copying, traffic)], averaging = run_on(world, COPYING, settings), run_on(ranks, AVERAGING, settings)
        show(COPYING, copying_texts(copying, traffic, averaging))
        [threads], processes = run_on(world, THREADS, settings), run_on(ranks, PROCESSES)
        show(THREADS, gil_texts(threads, processes))
    session.say("", ending(len(settings.devices)), f"Shown: {LESSON.shown}.")
    if plot:
        plot_memory(ways, plot)
        session.say(f"Drawn: {plot}")
    session.print_document(
        {
            "split": shares, "one_step": devices,
            **{f"gather {way.gather} on {way.output_device}": way.devices for way in ways},
            "copying": traffic, "averaging": averaging, "processes": processes,
        },
        devices=settings.devices, output_device=settings.output_device, batch_size=settings.batch_size,
        optimizer=settings.optimizer, ways=ways, one_device=alone, largest_batches=batches,
        means=means, claims={"copies": copies, "steps": steps}, copying_seconds=copying, threads=threads,
    )  # fmt: skip


def compare_training(session: Session, devices: tuple[str, ...], data: DataOptions, epochs: int) -> None:
    """Train on all devices and on the first alone, and show what each epoch brings both times."""
    results: list[TrainingResult] = []
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        settings = prepared.settings(TrainingSettings(folder=prepared.folder, epochs=epochs, seed=session.run.seed))
        session.say(f"data: {prepared}")
        for used in (devices, devices[:1]):
            session.say("", prose("training on ", heading(", ".join(used)), ", without dropout"))
            bar.show(f"training on {', '.join(used)}")
            printer = EpochPrinter(session, bar)
            results += session.world.run(RUN_TRAINING, TRAIN, settings, (used,), on_report=printer)
    together, alone = results
    difference = loss_difference(together, alone)
    session.say(
        "",
        f"Shown: {len(devices)} devices trained one model to the loss of one device (difference {difference:.1e}: in "
        f"float32 a sum in another order is rounded differently, and training amplifies that).",
    )
    both = {"epochs": together.epochs, "epochs_on_one_device": alone.epochs}
    session.print_document({}, devices=devices, dataset=prepared.summary, **both, loss_difference=difference)
