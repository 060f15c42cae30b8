"""The command `data-parallel`: the parts of DataParallel, its memory, its cures, its limits; and training with it."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console import plots
from playground.console.options import RunOptions, json_option, options, plot_option, seed_option, timeout_option
from playground.console.progress import TrainingProgress
from playground.console.session import Session
from playground.console.training import RUN_TRAINING
from playground.console.training_options import DataOptions, data_options, prepare_data
from playground.lessons import LESSONS
from playground.lessons.data_parallel import report
from playground.lessons.data_parallel.results import TrainingComparison, to_documents
from playground.lessons.data_parallel.settings import MAX_BATCH_SIZE, WAYS, DataParallelSettings, ways_to_compare
from playground.runtime import server
from playground.runtime.backends import backend_for
from playground.runtime.entry import World
from playground.runtime.errors import UsageError
from playground.runtime.remote import Remote
from playground.training.settings import TrainingSettings

LESSON = LESSONS["data-parallel"]
SPLIT, ONE_STEP, COMPARE, TWO_MEANS = map(LESSON.remote, ("split", "one_step", "ways", "two_means"))
COPYING, AVERAGING, THREADS, PROCESSES = (
    LESSON.remote(name, "limits") for name in ("copying", "averaging", "threads", "processes")
)

data_parallel_options = options(
    click.option(
        "--devices", default="4", show_default=True, metavar="N|LIST",
        help="Number of virtual devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:1.",
    ),
    click.option("--gather", type=click.Choice(WAYS), help="Only this way to the loss; without it, all are compared."),
    click.option("--output-device", metavar="DEVICE", help="Where to gather.  [default: the first device]"),
    click.option(
        "--batch-size", type=click.IntRange(1, MAX_BATCH_SIZE), default=32, show_default=True,
        help="Samples per step. (--train takes sgd's default instead.)",
    ),
    click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Steps that are timed."),
    click.option("--train", is_flag=True, help="Train as sgd does, on the devices and on the first alone."),
    click.option(
        "--epochs", type=click.IntRange(1), default=1, show_default=True, help="With --train: passes over the data."
    ),
    data_options,
    timeout_option,
    seed_option,
    plot_option("each device's memory"),
    json_option,
)  # fmt: skip


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@data_parallel_options
def command(
    devices: str, gather: str | None, output_device: str | None, batch_size: int, steps: int, train: bool, epochs: int,
    data: DataOptions, timeout: float, seed: int, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    if train and (gather or output_device or plot):
        raise UsageError(
            "--train gathers on the first device and draws nothing: no --gather, --output-device or --plot"
        )
    server.preload(SPLIT.module, COPYING.module)
    server.warm_up()
    names, output = resolve_names(devices, output_device)
    settings = DataParallelSettings(
        devices=names, output_device=output or names[0], ways=ways_to_compare(names, gather, output),
        batch_size=batch_size, steps=steps, seed=seed,
    )  # fmt: skip
    backend = backend_for(settings.device_type).name
    run = RunOptions(backend=backend, timeout=timeout, seed=seed, as_json=as_json)
    session = Session(LESSON.name, run, default_size=LESSON.default_size)
    if session.world.rank_env:
        raise UsageError(f"{LESSON.name} starts its processes itself: run it without torchrun, RANK and WORLD_SIZE")
    if plot:
        plots.check(plot)
    session.say(f"{LESSON.name}: one process, {len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    if train:
        compare_training(session, names, data, epochs)
    else:
        run_parts(session, settings, plot)


def resolve_names(devices: str, output_device: str | None) -> tuple[tuple[str, ...], str | None]:
    """The names of the devices, and of the one to gather on. Raises `UsageError` for those that do not exist."""
    # imports torch, at the same time as the ranks' server does
    from playground.lessons.data_parallel.devices import resolve_devices, resolve_output_device

    given = devices.replace(",", " ").split()
    if devices.isdecimal():
        given = [f"cpu:{number}" for number in range(int(devices))]
    resolved = resolve_devices(given)
    output = resolve_output_device(output_device, resolved) if output_device else None
    return tuple(map(str, resolved)), output and str(output)


def run_parts(session: Session, settings: DataParallelSettings, plot: Path | None) -> None:
    """Run the parts of the lesson, and show each as soon as it has been run."""
    world = session.world
    ranks = World(len(settings.devices), backend=world.backend, timeout=world.timeout)  # one per device

    def show(part: Remote, text: str) -> None:
        session.say(report.part_text(part.name, part.summary, text))

    [shares] = world.run(SPLIT, settings)
    show(SPLIT, report.split_text(shares))
    [devices] = world.run(ONE_STEP, settings)
    show(ONE_STEP, report.step_text(devices))
    [ways] = world.run(COMPARE, settings)
    [[alone]] = world.run(COMPARE, settings.on_first_device)
    show(COMPARE, report.ways_text(ways, alone))
    [means] = world.run(TWO_MEANS, settings)
    show(TWO_MEANS, report.means_text(means))
    [copying], averaging = world.run(COPYING, settings), ranks.run(AVERAGING, settings)
    show(COPYING, report.copying_text(copying, averaging))
    [threads], processes = world.run(THREADS, settings), ranks.run(PROCESSES)
    show(THREADS, report.gil_text(threads, processes))
    session.say(f"\n{report.ending(len(settings.devices))}\nShown: {LESSON.shown}.")
    if plot:
        report.plot_memory(ways, plot)
        session.say(f"\nDrawn: {plot}")
    session.print_document(
        {
            "split": to_documents(shares), "one_step": to_documents(devices),
            **{f"gather {way.gather} on {way.output_device}": way.devices for way in ways},
            "copying": copying.devices, "averaging": averaging, "processes": processes,
        },
        devices=settings.devices, output_device=settings.output_device, batch_size=settings.batch_size,
        ways=ways, one_device=alone, means=to_documents(means), copying_seconds=copying.seconds, threads=threads,
    )  # fmt: skip


def compare_training(session: Session, devices: tuple[str, ...], data: DataOptions, epochs: int) -> None:
    """Train on all devices and on the first alone, and show what each epoch brings both times."""
    prepared = prepare_data(data)
    settings = prepared.settings(TrainingSettings(folder=prepared.folder, epochs=epochs, seed=session.run.seed))
    results = []
    for used in (devices, devices[:1]):
        session.say(f"on {', '.join(used)}, {prepared}, no dropout:")
        with TrainingProgress(session.say) as progress:
            results += session.world.run(RUN_TRAINING, LESSON.remote("run"), settings, (used,), on_report=progress)[:1]
    together, alone = results
    comparison = TrainingComparison(together=together, alone=alone)
    session.say(report.training_text(comparison, len(devices)))
    session.print_document(
        {}, devices=devices, dataset=prepared.summary, epochs=together.epochs, epochs_on_one_device=alone.epochs,
        loss_difference=comparison.loss_difference,
    )  # fmt: skip
