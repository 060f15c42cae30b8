"""The command of a lesson that trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from playground.cli.options import help_of, options, speaker, world_options
from playground.cli.recipe import averaging, check_accumulation, check_shares, prepared, training_options
from playground.lessons import Lesson, module_of, run_training
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import PlaygroundError
from playground.show import results
from playground.show.progress import TrainingProgress

ROUNDING = 1e-4
"""How far replicas may drift apart where each adds in an order of its own (three of them, ten epochs: 1.2e-7)."""


def training_command(lesson: Lesson, *more_options: Callable[[Any], Any]) -> click.Command:
    """Train, and show it."""

    @click.command(lesson.name, help=help_of(lesson.name), short_help=lesson.teaches)
    @world_options
    @training_options
    @options(*more_options)
    def command(**asked: Any) -> None:
        if "sync" in asked:
            names = ("sync", "every", "bucket_cap_mb", "all_reduce")
            asked |= averaging(**{name: asked.pop(name) for name in names})
        train_and_show(lesson, **asked)

    return command


def train_and_show(
    lesson: Lesson, size: int | None, backend: str, timeout: float, init_method: str | None, as_json: bool,
    dataset: str, data_dir: Path, mirror: str | None, limit: int | None, **recipe: Any,
) -> None:  # fmt: skip
    """Prepare the data, train, show every epoch and that the replicas agree. `recipe`: fields of `Settings`."""
    started = time.perf_counter()
    world = World(size, usual_size=lesson.ranks, backend=backend, timeout=timeout, init_method=init_method)
    check_shares(world.size, recipe["batch_size"])
    server.preload(f"playground.lessons.{module_of(lesson.name)}")
    if recipe["loader"] == "per-sample":
        server.preload("torchvision.transforms")
    world.warm_up()
    settings, data = prepared(dataset, data_dir, mirror, limit)
    check_accumulation(recipe["accumulate"], recipe["batch_size"], data["train"])
    say = speaker(world, silent=as_json)
    say(f"{lesson.name}: {world}, {results.data_text(data)}")
    with TrainingProgress(say) as progress:
        outcome = world.run(run_training, lesson.name, settings | recipe, on_report=progress)[0]
    best = max(outcome["epochs"], key=lambda epoch: epoch["test_accuracy"])
    say(f"best test accuracy {best['test_accuracy']:.2%}, after epoch {best['epoch']}")
    if not math.isfinite(outcome["epochs"][-1]["loss"]):
        click.echo("the loss is not a finite number any more: training diverged, try a smaller --lr", err=True)
    agreement = judged(outcome["replicas_max_difference"], recipe.get("all_reduce"))
    say(f"Shown: {lesson.shown.format(size=world.size)}; {agreement}.")
    if as_json and world.speaks:
        steps = {"run": [{"loss": outcome["epochs"][-1]["loss_per_rank"][rank]} for rank in range(world.size)]}
        click.echo(results.document(lesson.name, world, started, steps, dataset=data, best=best, **outcome))


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
