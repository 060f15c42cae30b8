"""The command `data-parallel`: the parts of DataParallel, its memory, what helps, its limits; and training with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from playground.console import plots
from playground.console.dependent_options import only_with
from playground.console.epochs import EpochPrinter
from playground.console.memory_cap import memory_cap_option
from playground.console.options import (
    RunOptions,
    json_option,
    options,
    plot_option,
    see_option,
    seed_option,
    timeout_option,
    wide_option,
)
from playground.console.session import Session
from playground.console.tables import Table
from playground.console.text import Prose, heading, prose
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.lessons.data_parallel import report
from playground.lessons.data_parallel.results import LargestBatch, TrainingComparison, to_documents
from playground.lessons.data_parallel.settings import (
    MAX_BATCH_SIZE,
    OPTIMIZERS,
    WAYS,
    DataParallelSettings,
    check_device_count,
    ways_to_compare,
)
from playground.runtime import server
from playground.runtime.backends import backend_for
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.runtime.remote import Remote
from playground.training.settings import TrainingSettings

LESSON = LESSONS["data-parallel"]
SPLIT, ONE_STEP, COMPARE, TWO_MEANS = map(LESSON.remote, ("split", "one_step", "ways", "two_means"))
LARGEST_BATCHES, CLAIMS = LESSON.remote("largest_batches", "memory_cap"), LESSON.remote("claims", "claims")
COPYING, AVERAGING, THREADS, PROCESSES = (
    LESSON.remote(name, "limits") for name in ("copying", "averaging", "threads", "processes")
)

data_parallel_options = options(
    click.option(
        "--devices", default="4", show_default=True, metavar="N|LIST",
        help="Number of virtual devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:1.",
    ),
    click.option("--gather", type=click.Choice(WAYS), help="What to gather. By default all are compared."),
    click.option("--output-device", metavar="DEVICE", show_default="the first device", help="Where to gather."),
    click.option(
        "--batch-size", type=click.IntRange(1, MAX_BATCH_SIZE), default=32, show_default=True,
        help="Number of samples per step.",
    ),
    click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Number of steps to time."),
    click.option(
        "--optimizer", type=click.Choice(OPTIMIZERS), default="sgd", show_default=True,
        help="Whether the optimizer keeps nothing (sgd) or two numbers per parameter (adam).",
    ),
    memory_cap_option,
    click.option("--train", is_flag=True, help="Train as sgd does: on all devices, then on the first alone."),
    click.option(
        "--epochs", type=click.IntRange(1), default=1, show_default=True, help="With --train: passes over the data."
    ),
    data_options,
    timeout_option,
    seed_option,
    plot_option("each device's memory"),
    wide_option,
    json_option,
    see_option,
    only_with("epochs", "dataset", "data_dir", "mirror", "limit", train=(True,)),
    only_with("gather", "output_device", "batch_size", "steps", "optimizer", "memory_cap", "plot", train=(False,)),
)  # fmt: skip


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@data_parallel_options
def command(
    devices: str, gather: str | None, output_device: str | None, batch_size: int, steps: int, optimizer: str,
    memory_cap: int | None, train: bool, epochs: int, data: DataOptions, timeout: float, seed: int, plot: Path | None,
    wide: bool, as_json: bool, see: Path | None,
) -> None:  # fmt: skip
    server.preload(SPLIT.module, COPYING.module, CLAIMS.module, LARGEST_BATCHES.module)
    server.warm_up()
    names, output = resolve_names(devices, output_device)
    settings = DataParallelSettings(
        devices=names, output_device=output or names[0], ways=ways_to_compare(names, gather, output),
        batch_size=batch_size, steps=steps, optimizer=optimizer, seed=seed,
    )  # fmt: skip
    backend = backend_for(settings.device_type).name
    run = RunOptions(backend=backend, timeout=timeout, seed=seed, wide=wide, as_json=as_json, see=see)
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    if session.world.rank_env:
        raise UsageError(f"{LESSON.name} starts its processes itself: run it without torchrun, RANK and WORLD_SIZE")
    if plot:
        plots.check(plot)
    batches = find_largest_batches(session, settings, memory_cap) if memory_cap else []  # it may be refused
    session.say(f"{LESSON.name}: one process, {len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    if train:
        compare_training(session, names, data, epochs)
    else:
        run_parts(session, settings, batches, memory_cap or 0, plot)


def resolve_names(devices: str, output_device: str | None) -> tuple[tuple[str, ...], str | None]:
    """The names of the devices, and of the one to gather on. Raises `UsageError` for those that do not exist."""
    # imports torch, at the same time as the ranks' server does
    from playground.lessons.data_parallel.devices import resolve_devices, resolve_output_device

    resolved = resolve_devices(list_devices(devices))
    output = None if output_device is None else resolve_output_device(output_device, resolved)
    return tuple(map(str, resolved)), output and str(output)


def list_devices(devices: str) -> list[str]:
    """The names that --devices stands for: so many of the CPU, or those with commas between them."""
    if devices.isdecimal():
        check_device_count(float(devices))  # before so many names are made
        return [f"cpu:{number}" for number in range(int(devices))]
    names = [name.strip() for name in devices.split(",")]
    if "" in names:
        raise UsageError(f"--devices {devices!r}: a name is missing, write cpu:0,cpu:1 or a number")
    return names


def find_largest_batches(session: Session, settings: DataParallelSettings, cap: int) -> list[LargestBatch]:
    """The largest batch that fits, by each way. Raises `UsageError` if not even one sample does."""
    with session.bar() as bar:
        bar.show(LARGEST_BATCHES.name)
        [batches] = session.world.run(LARGEST_BATCHES, settings, cap, on_report=bar)
    return batches


def run_parts(
    session: Session, settings: DataParallelSettings, batches: list[LargestBatch], cap: int, plot: Path | None
) -> None:
    """Run the parts of the lesson, and show each as soon as it has been run. `batches` have been found before."""
    world = session.world
    devices = len(settings.devices)  # a rank for each
    ranks = World(devices, backend=world.backend, timeout=world.timeout, around=world.around)

    with session.bar() as bar:

        def run_on(where: World, part: Remote, *args: object) -> list[Any]:
            bar.show(part.name)
            return where.run(part, *args, on_report=bar)

        def show(part: Remote, texts: Sequence[str | Prose | Table]) -> None:
            session.say(*report.part_texts(part.name, part.summary, texts))

        [shares] = run_on(world, SPLIT, settings)
        show(SPLIT, report.split_texts(shares))
        [devices] = run_on(world, ONE_STEP, settings)
        show(ONE_STEP, report.step_texts(devices))
        [ways] = run_on(world, COMPARE, settings)
        [[alone]] = run_on(world, COMPARE, settings.on_first_device)
        show(COMPARE, report.ways_texts(ways, alone))
        if batches:
            show(LARGEST_BATCHES, report.fitting_texts(batches, cap, MAX_BATCH_SIZE))
        [means] = run_on(world, TWO_MEANS, settings)
        show(TWO_MEANS, report.means_texts(means))
        [claims] = run_on(world, CLAIMS, settings)
        show(CLAIMS, report.claims_texts(claims))
        [copying], averaging = run_on(world, COPYING, settings), run_on(ranks, AVERAGING, settings)
        show(COPYING, report.copying_texts(copying, averaging))
        [threads], processes = run_on(world, THREADS, settings), run_on(ranks, PROCESSES)
        show(THREADS, report.gil_texts(threads, processes))
    session.say("", report.ending(len(settings.devices)), f"Shown: {LESSON.shown}.")
    if plot:
        report.plot_memory(ways, plot)
        session.say(f"Drawn: {plot}")
    session.print_document(
        {
            "split": to_documents(shares), "one_step": to_documents(devices),
            **{f"gather {way.gather} on {way.output_device}": way.devices for way in ways},
            "copying": copying.devices, "averaging": averaging, "processes": processes,
        },
        devices=settings.devices, output_device=settings.output_device, batch_size=settings.batch_size,
        optimizer=settings.optimizer, ways=ways, one_device=alone, largest_batches=batches,
        means=to_documents(means), claims=claims, copying_seconds=copying.seconds, threads=threads,
    )  # fmt: skip


def compare_training(session: Session, devices: tuple[str, ...], data: DataOptions, epochs: int) -> None:
    """Train on all devices and on the first alone, and show what each epoch brings both times."""
    with session.bar() as bar:
        prepared = prepare_data(data, bar)
        settings = prepared.settings(TrainingSettings(folder=prepared.folder, epochs=epochs, seed=session.run.seed))
        session.say(f"data: {prepared}")
        results = []
        for used in (devices, devices[:1]):
            session.say("", prose("training on ", heading(", ".join(used)), ", without dropout"))
            bar.show(f"training on {', '.join(used)}")
            printer = EpochPrinter(session, bar)
            [result] = session.world.run(RUN_TRAINING, LESSON.remote("run"), settings, (used,), on_report=printer)
            results.append(result)
    together, alone = results
    comparison = TrainingComparison(together=together, alone=alone)
    session.say("", report.training_text(comparison, len(devices)))
    session.print_document(
        {}, devices=devices, dataset=prepared.summary, epochs=together.epochs, epochs_on_one_device=alone.epochs,
        loss_difference=comparison.loss_difference,
    )  # fmt: skip
