"""The command `ladder`: every rung and DistributedDataParallel, measured side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.cli.options import Finite, all_reduce_option, help_of, options, plot_option, speaker, world_options
from playground.cli.recipe import cap_in_bytes, check_shares, data_options, prepared
from playground.cli.training import judged
from playground.lessons import LESSONS, run_training
from playground.measure import environment
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible
from playground.show import ladder as show, plots, results
from playground.show.progress import TrainingProgress

LESSON = LESSONS["ladder"]
COPIES = 6 * len(show.ABOUT)
"""Of a model in a rank's memory: parameters, gradients, momentum, messages of each contestant (measured: 34)."""


@dataclass(frozen=True)
class Model:
    """How many float32 parameters it has, and what it is run with unless the user asks for something else."""

    parameters: int
    steps: int
    batch_size: int
    bucket_cap_mb: float


MODELS = {"net": Model(21_840, 100, 128, 0.05), "resnet18": Model(11_175_370, 20, 32, 25)}
"""In a bucket of the usual 25 MB all gradients of net have room, and then none can leave before the last is there."""


def by_model(name: str) -> str:
    """The defaults, as --help shows them."""
    return ", ".join(f"{getattr(model, name):g} for {which}" for which, model in MODELS.items())


ladder_options = options(
    click.option("--model", type=click.Choice(tuple(MODELS)), default="net", show_default=True, help="What to train."),
    click.option("--steps", type=click.IntRange(1), show_default=by_model("steps"), help="To time, of each."),
    click.option(
        "--batch-size", type=click.IntRange(1), show_default=by_model("batch_size"), help="Of all ranks together."
    ),
    click.option(
        "--bucket-cap-mb", type=Finite(0, 1e6, min_open=True), show_default=by_model("bucket_cap_mb"), metavar="MB",
        help="A bucket of gradients is full once it holds so much, here and in DistributedDataParallel.",
    ),
    all_reduce_option,
    data_options,
    plot_option("a bar for each rung"),
)  # fmt: skip


@click.command(LESSON.name, help=help_of(LESSON.name), short_help=LESSON.teaches)
@world_options
@ladder_options
def command(
    size: int | None, backend: str, timeout: float, init_method: str | None, as_json: bool, model: str,
    plot: Path | None, dataset: str, data_dir: Path, mirror: str | None, limit: int | None, **asked: Any,
) -> None:  # fmt: skip
    started = time.perf_counter()
    world = World(size, usual_size=LESSON.ranks, backend=backend, timeout=timeout, init_method=init_method)
    steps, settings = completed(model, **asked)
    check_model(world, model, settings["batch_size"])
    if plot:
        plots.check(plot)
    server.preload("playground.lessons.ladder", *(["torchvision.models"] if model == "resnet18" else []))
    world.warm_up()
    where, data = prepared(dataset, data_dir, mirror, limit)
    check_samples(settings["batch_size"], data["train"])
    say = speaker(world, silent=as_json)
    work = f"{model}, {steps} steps of {settings['batch_size']} samples"
    say(f"{LESSON.name}: {world}, {results.data_text(data)}, {work}\n{show.rungs_text()}")
    with TrainingProgress(say) as progress:
        outcome = world.run(run_training, LESSON.name, settings | where, (model, steps), on_report=progress)[0]
    rungs, parts = outcome["rungs"], {"run": outcome.pop("parts")}
    agree = agreement(rungs, settings["all_reduce"])
    say(f"\n{show.table_text(rungs)}\nShown: {LESSON.shown}; {show.fastest_text(rungs)}; {agree}.")
    if plot and world.speaks:
        show.plot(rungs, f"{model}, {world}", plot)
    if as_json and world.speaks:
        recipe = {name: settings[name] for name in ("batch_size", "bucket_cap", "all_reduce", "seed")}
        recipe |= {"dataset": data, "model": model, "timed_steps": steps}
        click.echo(results.document(LESSON.name, world, started, parts, **recipe, **outcome))


def completed(
    model: str, steps: int | None, batch_size: int | None, bucket_cap_mb: float | None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Steps and settings, with the model's own for what was not asked."""
    usual = MODELS[model]
    cap = cap_in_bytes(bucket_cap_mb or usual.bucket_cap_mb)
    return steps or usual.steps, {"batch_size": batch_size or usual.batch_size, "bucket_cap": cap, **more}


def check_model(world: World, model: str, batch_size: int) -> None:
    """Raise `Impossible` for shares of a batch that a model cannot train on, and for more models than have room."""
    check_shares(world.size, batch_size)
    if model == "resnet18" and batch_size < 2 * world.size:
        raise Impossible(
            f"--batch-size {batch_size} for {world.size} ranks: resnet18's BatchNorm needs two samples or more on "
            f"each, so at least {2 * world.size}"
        )
    needed = world.local_size * COPIES * 4 * MODELS[model].parameters
    there = environment.memory("MemAvailable")
    if world.device == "cpu" and needed > there:
        raise Impossible(
            f"--model {model}: {world.local_size} ranks need about {needed:,} bytes of memory for {len(show.ABOUT)} "
            f"replicas each and {there:,} are free: use fewer ranks or --model net"
        )


def check_samples(batch_size: int, samples: int) -> None:
    """Raise `Impossible` if there is no whole batch."""
    if batch_size > samples:
        raise Impossible(f"--batch-size {batch_size}: there are {samples} samples to train on, choose no more")


def agreement(rungs: list[dict[str, Any]], all_reduce: str) -> str:
    """What to say of the replicas. Raises `PlaygroundError` if those of a rung, or of DistributedDataParallel, differ
    that must not."""
    said = {}
    for rung in rungs:
        difference = rung["replicas_max_difference"]
        said[difference] = judged(difference, None if rung is rungs[-1] else all_reduce)
    return said[max(said)]
