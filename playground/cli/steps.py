"""The command of a lesson that is a row of steps."""

from __future__ import annotations

import time

import click

from playground.cli.options import help_of, speaker, world_options
from playground.lessons import Lesson, about, by_step, run_steps
from playground.runtime.entry import World
from playground.show import results


def steps_command(lesson: Lesson) -> click.Command:
    """Run the steps, show what every rank had before and after each."""

    @click.command(lesson.name, help=help_of(lesson.name), short_help=lesson.teaches)
    @world_options
    @click.option("--only", type=click.Choice(lesson.steps), multiple=True, help="Run only this step; may be repeated.")
    def command(
        size: int | None, backend: str, timeout: float, seed: int, init_method: str | None, as_json: bool,
        only: tuple[str, ...],
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        world = World(
            size, usual_size=lesson.ranks, least=lesson.least, backend=backend, timeout=timeout, init_method=init_method
        )
        say = speaker(world, silent=as_json)
        say(f"{lesson.name}: {world}")
        names = [step for step in lesson.steps if not only or step in only]
        by_rank = world.run(run_steps, lesson.name, names, seed)
        left = by_step(names, by_rank)
        for name, ranks in left.items():
            say("\n" + results.step_text(name, about(lesson.name)[name], ranks, lesson.says))
        say(f"\nShown: {lesson.shown.format(size=world.size)}.")
        if as_json and world.speaks:
            click.echo(results.document(lesson.name, world, started, left))

    return command
