"""The command `allreduce`: the algorithms' messages, step by step."""

from __future__ import annotations

import time

import click

from playground.cli.options import help_of, speaker, world_options
from playground.lessons import LESSONS, about, by_step, run_steps
from playground.runtime.entry import World
from playground.runtime.errors import Impossible
from playground.show import messages, results

LESSON = LESSONS["allreduce"]
NAMES = {step.replace("_", "-"): step for step in LESSON.steps}
TOLD = ("reduce-broadcast", "all-to-all", "tutorial-ring", "ring")
"""Without a choice of the user's these are told step by step; the table at the end has all."""
MOST_ELEMENTS = 64
"""As many as still can be read; `bench` takes larger ones."""


@click.command(LESSON.name, help=help_of(LESSON.name), short_help=LESSON.teaches)
@world_options
@click.option("--algorithm", type=click.Choice(list(NAMES)), multiple=True, help="Only this one; may be repeated.")
@click.option("--elements", type=click.IntRange(1, MOST_ELEMENTS), help="Of the tensor; as many as ranks by default.")
def command(
    size: int | None, backend: str, timeout: float, seed: int, init_method: str | None, as_json: bool,
    algorithm: tuple[str, ...], elements: int | None,
) -> None:  # fmt: skip
    started = time.perf_counter()
    world = World(
        size, usual_size=LESSON.ranks, least=LESSON.least, backend=backend, timeout=timeout, init_method=init_method
    )
    if elements is None and world.size > MOST_ELEMENTS:
        raise Impossible(f"{world.size} ranks with an element each are more than can be read: choose --elements")
    say = speaker(world, silent=as_json)
    say(f"{LESSON.name}: {world}, {elements or world.size} elements of {messages.ELEMENT} bytes")
    names = [name for name in NAMES if not algorithm or name in algorithm]
    by_rank = world.run(run_steps, LESSON.name, [NAMES[name] for name in names], seed, (elements,))
    by_name = by_step(names, by_rank)
    for name, ranks in by_name.items():
        if name in (algorithm or TOLD):
            say("\n" + messages.story(name, about(LESSON.name)[NAMES[name]], ranks))
    say("\n" + messages.comparison(by_name))
    say(f"\nShown: {LESSON.shown.format(size=world.size)}.")
    if as_json and world.speaks:
        cost = {name: messages.loads(ranks) for name, ranks in by_name.items()}
        click.echo(results.document(LESSON.name, world, started, by_name, cost=cost))
