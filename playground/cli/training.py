"""The command of a lesson that trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from playground.cli.options import ALL_REDUCES, Finite, options, speaker, world_options
from playground.lessons import Lesson, about, run_training
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible, PlaygroundError
from playground.show import results
from playground.show.progress import TrainingProgress
from playground.training import prepare as preparing

AVERAGING = ("per-parameter", "flat")
ROUNDING = 1e-4
"""How far replicas may drift apart where each adds in an order of its own (three of them, ten epochs: 1.2e-7)."""

data_options = options(
    click.option(
        "--dataset", type=click.Choice(preparing.DATASETS), default="auto", show_default=True,
        help="auto: MNIST if it is here or can be downloaded, else generated digits.",
    ),
    click.option(
        "--data-dir", type=click.Path(path_type=Path), default=preparing.default_data_dir, envvar="PLAYGROUND_DATA_DIR",
        show_default="~/.cache/playground", help="Where the data lies or is to be put.",
    ),
    click.option(
        "--mirror", envvar="PLAYGROUND_MNIST_MIRROR", metavar="URL",
        help="Folder or address (file://, http://, https://) with MNIST's four .gz files.",
    ),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Train on the first N samples only."),
)  # fmt: skip
training_options = options(
    click.option("--epochs", type=click.IntRange(1), default=10, show_default=True),
    click.option("--batch-size", type=click.IntRange(1), default=128, show_default=True, help="Of all ranks together."),
    click.option("--lr", type=Finite(0), default=0.01, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True),
    data_options,
)
sync_option = click.option(
    "--sync", type=click.Choice(AVERAGING), default="flat", show_default=True, help="How gradients are averaged."
)
all_reduce_option = click.option(
    "--all-reduce", type=click.Choice(ALL_REDUCES), default="backend", show_default=True,
    help="What adds gradients up: the backend's own or one of ours.",
)  # fmt: skip


def training_command(lesson: Lesson, *more_options: Callable[[Any], Any]) -> click.Command:
    """Prepare the data, train, show every epoch and that the replicas agree."""

    @click.command(lesson.name, help=about(lesson.name)[""], short_help=lesson.teaches)
    @world_options
    @training_options
    @options(*more_options)
    def command(
        size: int | None, backend: str, timeout: float, seed: int, init_method: str | None, as_json: bool,
        dataset: str, data_dir: Path, mirror: str | None, limit: int | None, batch_size: int, **recipe: Any,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        world = World(size, usual_size=lesson.ranks, backend=backend, timeout=timeout, init_method=init_method)
        if batch_size < world.size:
            raise Impossible(
                f"--batch-size {batch_size} for {world.size} ranks: it is for all together, so at least one each"
            )
        server.preload("playground.training.loop")
        world.warm_up()
        source, data = prepared(dataset, data_dir, mirror, limit)
        say = speaker(world, silent=as_json)
        say(f"{lesson.name}: {world}, {results.data_text(data)}")
        with TrainingProgress(say) as progress:
            recipe |= {"dataset": source.name, "limit": limit, "batch_size": batch_size, "seed": seed}
            outcome = world.run(run_training, lesson.name, {"folder": source.folder, **recipe}, on_report=progress)[0]
        best = max(outcome["epochs"], key=lambda epoch: epoch["test_accuracy"])
        say(f"best test accuracy {best['test_accuracy']:.2%}, after epoch {best['epoch']}")
        if not math.isfinite(outcome["epochs"][-1]["loss"]):
            click.echo("the loss is not a finite number any more: training diverged, try a smaller --lr", err=True)
        agreement = judged(outcome["replicas_max_difference"], recipe.get("all_reduce"))
        say(f"Shown: {lesson.shown.format(size=world.size)}; {agreement}.")
        if as_json and world.speaks:
            steps = {"run": [{"loss": outcome["epochs"][-1]["loss_per_rank"][rank]} for rank in range(world.size)]}
            click.echo(results.document(lesson.name, world, started, steps, dataset=data, best=best, **outcome))

    return command


def prepared(
    dataset: str, data_dir: Path, mirror: str | None, limit: int | None
) -> tuple[preparing.Source, dict[str, Any]]:
    """The data, ready, and what to say of it. Raises `NoData`, and `Impossible` for a limit beyond it."""
    source = preparing.prepare(dataset, data_dir, mirror, say=lambda line: click.echo(line, err=True))
    train, test = preparing.samples(source, "train"), preparing.samples(source, "t10k")
    if limit and limit > train:
        raise Impossible(f"--limit {limit}: {source.name} has {train} samples to train on")
    return source, {"name": source.name, "train": limit or train, "test": test, "why": source.why}


def judged(difference: float, all_reduce: str | None) -> str:
    """What to say of the largest difference between replicas. Raises `PlaygroundError` if it must not be there."""
    if difference == 0:
        return "all replicas are bit-identical (largest difference 0.0)"
    if all_reduce == "tutorial-ring" and difference < ROUNDING:
        return (
            f"the replicas differ by up to {difference:.1e}: "
            f"round this ring each rank adds in an order of its own, and rounding depends on the order"
        )
    raise PlaygroundError(f"the replicas differ by up to {difference}: they must not at all")
