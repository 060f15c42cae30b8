"""The command `data-parallel`: the parts of DataParallel, its memory, its cures, its limits; and training with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from playground.cli.options import help_of, json_option, options, plot_option, seed_option, speaker, timeout_option
from playground.cli.recipe import data_options, prepared
from playground.lessons import LESSONS, about, run_steps, run_training
from playground.runtime import server
from playground.runtime.backends import backend_for
from playground.runtime.entry import World
from playground.runtime.errors import Impossible
from playground.show import data_parallel as show, plots, results
from playground.show.progress import TrainingProgress

LESSON = LESSONS["data-parallel"]
LIMITS = "data-parallel-limits"
MOST_DEVICES, MOST_SAMPLES = 64, 256
WAYS = ("logits", "loss", "outputs")

data_parallel_options = options(
    click.option(
        "--devices", default="4", show_default=True, metavar="N|LIST",
        help="So many virtual devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:1.",
    ),
    click.option("--gather", type=click.Choice(WAYS), help="Only this way to the loss; without it, all are compared."),
    click.option("--output-device", metavar="DEVICE", help="Where to gather.  [default: the first device]"),
    click.option("--batch-size", type=click.IntRange(1, MOST_SAMPLES), default=32, show_default=True),
    click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="To take the time of."),
    click.option("--train", "training", is_flag=True, help="Train as sgd does, on the devices and on the first alone."),
    click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="With --train."),
    data_options,
    timeout_option,
    seed_option,
    plot_option("each device's memory"),
    json_option,
)  # fmt: skip


@click.command(LESSON.name, help=help_of(LESSON.name), short_help=LESSON.teaches)
@data_parallel_options
def command(
    devices: str, gather: str | None, output_device: str | None, training: bool, timeout: float, plot: Path | None,
    as_json: bool, **asked: Any,
) -> None:  # fmt: skip
    started = time.perf_counter()
    if training and (gather or output_device or plot):
        raise Impossible(
            "--train gathers on the first device and draws nothing: no --gather, --output-device or --plot"
        )
    server.preload("playground.lessons.data_parallel", "playground.lessons.data_parallel_limits")
    server.warm_up()
    names, output = places(devices, output_device)
    world = World(None, usual_size=1, backend=backend_for(names[0].split(":")[0]).name, timeout=timeout)
    if world.place:
        raise Impossible(f"{LESSON.name} starts its processes itself: run it without torchrun, RANK and WORLD_SIZE")
    if plot:
        plots.check(plot)
    say = speaker(world, silent=as_json)
    say(f"{LESSON.name}: one process, {len(names)} device{'s' * (len(names) > 1)}: {', '.join(names)}")
    if training:
        steps, more = trained(world, names, say, **asked)
    else:
        ways = asked_ways(gather, names, output_device and output)
        steps, more = told(world, names, output, ways, say, asked["batch_size"], asked["steps"], asked["seed"])
    if plot:
        show.memory_plot(more["ways"], plot)
        say(f"\nDrawn: {plot}")
    if as_json:
        click.echo(results.document(LESSON.name, world, started, steps, devices=names, **more))


def places(devices: str, output_device: str | None) -> tuple[list[str], str]:
    """The devices' names, and where to gather. Raises `Impossible` for what is not there."""
    number = int(devices) if devices.isdecimal() else 0
    names = [f"cpu:{n}" for n in range(number)] if devices.isdecimal() else devices.replace(",", " ").split()
    if len(names) > MOST_DEVICES:
        raise Impossible(f"--devices {devices}: at most {MOST_DEVICES}, each has a thread and a process here")
    from playground.data_parallel.devices import known, one_of

    found = known(names)
    if len(set(found)) < len(found):
        raise Impossible(f"--devices {devices}: a device named twice would count twice, name each once")
    return list(map(str, found)), str(one_of(output_device, found))


def asked_ways(gather: str | None, names: list[str], output: str | None) -> list[tuple[str, str]]:
    """Pairs of what is gathered and where: the one asked for, or the usual one and its three cures."""
    if gather:
        return [(gather, output or names[0])]
    elsewhere = output or names[min(1, len(names) - 1)]
    return list(dict.fromkeys([*((way, names[0]) for way in WAYS), ("logits", elsewhere)]))


def told(
    world: World, names: list[str], output: str, ways: list[tuple[str, str]], say: Callable[[str], None],
    batch_size: int, rounds: int, seed: int,
) -> tuple[dict[str, list[Any]], dict[str, Any]]:  # fmt: skip
    """Tell the story, each part as soon as it has been run. What has values by device (or rank), and what else."""
    ranks = World(len(names), backend=world.backend, timeout=world.timeout)
    texts = about(LESSON.name) | about(LIMITS)

    def run(step: str, *more: Any, lesson: str = LESSON.name, on: World = world) -> list[Any]:
        return [outcomes[0] for outcomes in on.run(run_steps, lesson, [step], seed, more)]

    limits = partial(run, lesson=LIMITS)
    steps: dict[str, list[Any]] = {}
    [steps["split"]] = run("split", names)
    say(show.part("split", texts, show.split_text(steps["split"])))
    [steps["one_step"]] = run("one_step", names, output, batch_size)
    say(show.part("one_step", texts, show.step_text(steps["one_step"])))
    [compared] = run("ways", names, ways, batch_size, rounds)
    [[alone]] = run("ways", names[:1], [("logits", names[0])], batch_size, 1)
    say(show.part("ways", texts, show.ways_text(compared, alone)))
    steps |= {f"gather {way['gather']} on {way['output_device']}": way["devices"] for way in compared}
    [means] = run("two_means", names)
    say(show.part("two_means", texts, show.means_text(means)))
    [copying] = limits("copying", names, batch_size, rounds)
    averaging = limits("averaging", batch_size, rounds, on=ranks)
    say(show.part("copying", texts, show.copying_text(copying, averaging)))
    [threads], processes = limits("threads", names), limits("processes", on=ranks)
    say(show.part("threads", texts, show.lock_text(threads, processes)))
    say(f"\n{show.ending(len(names))}\nShown: {LESSON.shown}.")
    steps |= {"copying": copying["devices"], "averaging": averaging, "processes": processes}
    more = {
        "ways": compared,
        "one_device": alone,
        "means": means,
        "copying_seconds": copying["seconds"],
        "threads": threads,
    }
    return steps, {"output_device": output, "batch_size": batch_size, **more}


def trained(
    world: World, names: list[str], say: Callable[[str], None], dataset: str, data_dir: Path, mirror: str | None,
    limit: int | None, epochs: int, seed: int, **_: Any,
) -> tuple[dict[str, list[Any]], dict[str, Any]]:  # fmt: skip
    """Train on all devices and on the first alone: what each epoch brought both times."""
    settings, data = prepared(dataset, data_dir, mirror, limit)
    settings |= {"epochs": epochs, "seed": seed}
    outcomes = []
    for some in (names, names[:1]):
        say(f"on {', '.join(some)}, {results.data_text(data)}, no dropout:")
        with TrainingProgress(say) as progress:
            outcomes.append(world.run(run_training, LESSON.name, settings, (some,), on_report=progress)[0])
    together, alone = (outcome["epochs"] for outcome in outcomes)
    difference = abs(together[-1]["loss"] - alone[-1]["loss"])
    say(
        f"Shown: {len(names)} devices trained one model to the loss of one device (difference {difference:.1e}: "
        f"float32 rounds sums of other parts otherwise, and training enlarges it)."
    )
    return {}, {"dataset": data, "epochs": together, "epochs_on_one_device": alone, "loss_difference": difference}
