"""The commands of lessons, and that of a lesson that is a row of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import click

from playground.console.lesson import Lesson
from playground.console.options import only_option
from playground.console.session import Session
from playground.console.tables import RANK_COLUMN, Column, Table, Texts, cell, numbers
from playground.console.text import heading, prose
from playground.runtime.remote import remote

MANY = 6
"""Number of columns from which on values that all ranks share are shown once, below the table."""


def step_texts(name: str, about: str, returned: Sequence[object]) -> Texts:
    """One step: what it does, then what every rank had before and after."""
    ranks = [each if isinstance(each, Mapping) else vars(each) for each in returned]
    head = prose(heading(name), f": {about}")
    if refused := [rank["refused"] for rank in ranks if "refused" in rank]:
        return [head, f"  the backend refuses: {refused[0]}"]
    return [head, *rank_texts(ranks)]


def rank_texts(ranks: Sequence[Mapping[str, object]]) -> Texts:
    """One row per rank. Values that are the same on every rank follow below; those of several
    things, as a table."""
    columns = [
        name
        for name in dict.fromkeys(name for values in ranks for name in values)
        if name != "rank"
    ]
    shared = [
        name
        for name in columns
        if all(name in each and each[name] == ranks[0].get(name) for each in ranks)
    ]
    are_many = len(columns) >= MANY and len(ranks) > 1
    below: Texts = []
    for name, value in ((name, ranks[0][name]) for name in shared):
        items = value if isinstance(value, Mapping) else {}
        if items and all(isinstance(each, Mapping) for each in items.values()):
            headings = [*dict.fromkeys(key for each in items.values() for key in each)]
            rows = ((key, *map(each.get, headings)) for key, each in items.items())
            below.append(Table(Column(name), *numbers(*headings), rows=rows))
        elif len(items) > 1:
            rows = ((f"  {key}", item) for key, item in items.items())
            below += [
                f"  {name}, on every rank:",
                Table("", Column("", wraps=True), rows=rows, headed=False),
            ]
        elif are_many:
            below.append(f"  {name}, on every rank: {cell(value)}")
        else:
            continue
        columns.remove(name)
    table = Table(RANK_COLUMN, *(Column(name, wraps=True) for name in columns))
    for rank, values in enumerate(ranks):
        table.add(rank, *(values.get(name) for name in columns))
    return [table, *below] if columns else below


RUN_STEPS = remote("playground.runtime.rank.steps:run_steps")


def steps_command(lesson: Lesson) -> click.Command:
    """Run the steps, show what every rank had before and after each."""

    @lesson.run_by(only_option(lesson.steps, "steps"))
    def command(session: Session, only: tuple[str, ...]) -> None:
        steps = [lesson.remote(step) for step in lesson.steps if not only or step in only]
        session.world.warm_up(RUN_STEPS, *steps)
        session.say(f"{lesson.name}: {session.world}")
        by_rank = session.launch(RUN_STEPS, steps, session.run.seed)
        by_step = dict(zip((step.name for step in steps), zip(*by_rank, strict=True), strict=True))
        for step in steps:
            session.say("", *step_texts(step.name, step.summary, by_step[step.name]))
        shown = ", ".join(by_step)
        # without all steps, or where a reader has changed one or a backend refuses it
        with contextlib.suppress(LookupError, TypeError):
            shown = lesson.conclude(session.world.size, **by_step)
        session.say("", f"Shown: {shown}.")
        session.print_document(by_step)

    return command
