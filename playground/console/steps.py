"""The command of a lesson that is a row of steps."""

from __future__ import annotations

import click

from playground.console.lesson import Lesson
from playground.console.options import RunOptions, run_options
from playground.console.rank_tables import step_texts
from playground.console.session import Session
from playground.runtime.remote import remote

RUN_STEPS = remote("playground.runtime.steps:run_steps")


def steps_command(lesson: Lesson) -> click.Command:
    """Run the steps, show what every rank had before and after each."""

    @click.command(lesson.name, help=lesson.help, short_help=lesson.teaches)
    @run_options(lesson.default_size)
    @click.option(
        "--only", type=click.Choice(lesson.steps), metavar="STEP", multiple=True,
        help=f"Run only this step; may be repeated: {', '.join(lesson.steps)}.",
    )  # fmt: skip
    def command(run: RunOptions, only: tuple[str, ...]) -> None:
        session = Session(lesson.name, run, default_size=lesson.default_size, min_size=lesson.min_size)
        steps = [lesson.remote(step) for step in lesson.steps if not only or step in only]
        session.world.warm_up(RUN_STEPS, *steps)
        session.say(f"{lesson.name}: {session.world}")
        by_rank = session.world.run(RUN_STEPS, steps, run.seed)
        by_step = dict(zip((step.name for step in steps), zip(*by_rank, strict=True), strict=True))
        for step in steps:
            session.say("", *step_texts(step.name, step.summary, by_step[step.name], lesson.says))
        shown = ", ".join(step.name for step in steps) if only else lesson.conclude(session.world.size)
        session.say("", f"Shown: {shown}.")
        session.print_document(by_step)

    return command
