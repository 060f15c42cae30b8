"""The command `prove`: N ranks against one process, and what breaks it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import click

from playground.cli.options import Finite, all_reduce_option, bucket_cap_of, help_of, options, speaker, world_options
from playground.cli.recipe import cap_in_bytes, check_shares, data_options, prepared
from playground.lessons import LESSONS, about, run_training
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import PlaygroundError
from playground.show import prove as show, results
from playground.training.partition import share

LESSON = LESSONS["prove"]
BREAKS = "prove-breaks"
OPEN = 1e-6
"""How much of a break its explanation may leave open."""

prove_options = options(
    click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Of all ranks together."),
    click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="To compare after each of."),
    click.option("--lr", type=Finite(0, min_open=True), default=0.01, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True),
    all_reduce_option,
    bucket_cap_of(0.01),
    data_options,
)


@click.command(LESSON.name, help=help_of(LESSON.name), short_help=LESSON.teaches)
@world_options
@prove_options
def command(
    size: int | None, backend: str, timeout: float, init_method: str | None, as_json: bool,
    dataset: str, data_dir: Path, mirror: str | None, limit: int | None, steps: int, bucket_cap_mb: float,
    **recipe: Any,
) -> None:  # fmt: skip
    started = time.perf_counter()
    world = World(size, usual_size=LESSON.ranks, backend=backend, timeout=timeout, init_method=init_method)
    check_shares(world.size, recipe["batch_size"])
    server.preload("playground.lessons.prove", "playground.lessons.prove_breaks")
    world.warm_up()
    settings, data = prepared(dataset, data_dir, mirror, limit)
    say = speaker(world, silent=as_json)
    shared = show.shared(recipe["batch_size"], world.size)
    say(f"{LESSON.name}: {world}, {results.data_text(data)}, {steps} steps, batches of {shared}, no dropout")
    recipe |= {"limit": limit, "bucket_cap": cap_in_bytes(bucket_cap_mb)}
    telling = show.Telling(say, about(BREAKS) | {"equal": about(LESSON.name)["run"]})
    [outcome, *_] = world.run(start, settings | recipe, steps, on_report=telling)
    if as_json and world.speaks:
        samples = [{"samples": share(recipe["batch_size"], rank, world.size)} for rank in range(world.size)]
        more = {"dataset": data, "recipe": recipe, **outcome}
        click.echo(results.document(LESSON.name, world, started, {"equal": samples}, **more))
    check(outcome["proof"], outcome["breaks"])
    shown = LESSON.shown.format(size=world.size)
    say(f"\nShown: {shown} ({show.summary(outcome['proof'])}){show.broken(outcome['breaks'])}.")


def start(rank: int, size: int, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """What a rank runs: the proof, then, where there is somebody to differ from, what breaks it."""
    proof = run_training(rank, size, LESSON.name, settings, (steps,))
    return {"proof": proof, "breaks": run_training(rank, size, BREAKS, settings, (steps,)) if size > 1 else {}}


def check(proof: dict[str, Any], breaks: dict[str, Any]) -> None:
    """Raise `PlaygroundError` if N ranks are not one process, or if what explains a break leaves some of it open."""
    if wrong := show.failure(proof):
        raise PlaygroundError(wrong)
    for name, outcome in breaks.items():
        bound = max(show.EXACT, OPEN * max(outcome["breaks"].values()))
        for what, difference in outcome["holds"].items():
            if not difference <= bound < math.inf:
                raise PlaygroundError(
                    f"{name}: {what}: {difference:.1e} should be rounding (at most {bound:.1e}), so this break is not "
                    f"what it is said to be; {show.GROWN}"
                )
