"""The commands of lessons, and that of a lesson that is a row of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from playground.console.options import COMMON
from playground.console.session import Session, session_command
from playground.console.tables import RANK_COLUMN, Column, Table, Texts, cell, numbers
from playground.console.text import heading, prose, rank_number
from playground.console.units import plural
from playground.runtime.remote import Remote, docstrings, module_exists, rank_functions, remote

FURTHER = "further"
ON_THE_PATH = "The path, in order"


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A row of the path. Everything else about a lesson lies in its folder."""

    name: str
    """Its command."""
    package: str
    """The package in which its folder is."""
    teaches: str
    """One line for the path."""
    shown: str
    """Conclusion in the last line of its output: `conclude` fills it in."""
    default_size: int
    """World size unless the user asks for another."""
    min_size: int = 1
    """Smallest world in which it makes sense."""
    says: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines each rank has to say after a step, by the step's name, as tutorials print them."""
    options: Sequence[str] = COMMON
    """Those of every run that it has: fields of `RunOptions`."""
    folder: str = ""
    """Where it lies, if its command has another name."""
    part: str = ON_THE_PATH
    """Title of the part of the course that it belongs to."""

    @property
    def path(self) -> str:
        folder = self.folder or self.name.replace("-", "_")
        return f"{self.package.replace('.', '/')}/{folder}"

    def module(self, part: str = "lesson") -> str:
        return f"{self.path.replace('/', '.')}.{part}"

    @property
    def command(self) -> Remote | None:
        """Its command, if it has one of its own; without one it is a row of steps."""
        part = next(
            (part for part in ("page", "command") if module_exists(self.module(part))), None
        )
        return self.remote("command", part) if part else None

    def conclude(self, size: int, **values: str) -> str:
        """The conclusion, for a world of this size; `values`: further fields of `shown`."""
        return self.shown.format(ranks=plural(size, "rank"), **values)

    def remote(self, function: str, part: str = "") -> Remote:
        """That function, of the board unless it is a step beside it."""
        part = part or (FURTHER if function in self.further else "lesson")
        return remote(f"{self.module(part)}:{function}")

    @property
    def further(self) -> list[str]:
        """Steps that do not stand on the board: details, and what needs more than torch."""
        return rank_functions(self.module(FURTHER)) if module_exists(self.module(FURTHER)) else []

    @property
    def steps(self) -> list[str]:
        return [*rank_functions(self.module()), *self.further]

    @property
    def help(self) -> str:
        """The docstring of the lesson, for click, which would fill indented lines as if they were
        prose."""
        return docstrings(self.module())[""].replace("\n\n    ", "\n\n\b\n    ")

    @property
    def texts(self) -> dict[str, str]:
        return {
            **(docstrings(self.module(FURTHER)) if self.further else {}),
            **docstrings(self.module()),
        }

    def run_by(
        self, *decorators: Callable[[Any], Any]
    ) -> Callable[[Callable[..., None]], click.Command]:
        """A decorator that makes a function the command of the lesson: see `session_command`."""
        about = {"help": self.help, "short_help": self.teaches}
        size, least, only = self.default_size, self.min_size, self.options
        return session_command(
            self.name, *decorators, only=only, size=size, min_size=least, **about
        )


MANY = 6
"""Number of columns from which on values that all ranks share are shown once, below the table."""


def step_texts(
    name: str, about: str, returned: Sequence[object], says: Sequence[str] = ()
) -> Texts:
    """One step: what it does, then what every rank had before and after, and each line that all of
    them say."""
    ranks = [each if isinstance(each, Mapping) else vars(each) for each in returned]
    head = prose(heading(name), f": {about}")
    if refused := [rank["refused"] for rank in ranks if "refused" in rank]:
        return [head, f"  the backend refuses: {refused[0]}"]
    texts = [head, *rank_texts(ranks)]
    for line in says:
        before, _, after = line.partition("{rank}")
        # a step that a reader has changed may return other names
        with contextlib.suppress(KeyError):
            texts += [
                prose(before, rank_number(rank), after.format(**values))
                for rank, values in enumerate(ranks)
            ]
    return texts


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
    about = f"Run only this step; may be repeated: {', '.join(lesson.steps)}."

    @lesson.run_by(
        click.option(
            "--only", type=click.Choice(lesson.steps), metavar="STEP", multiple=True, help=about
        )
    )
    def command(session: Session, only: tuple[str, ...]) -> None:
        steps = [lesson.remote(step) for step in lesson.steps if not only or step in only]
        session.world.warm_up(RUN_STEPS, *steps)
        session.say(f"{lesson.name}: {session.world}")
        by_rank = session.launch(RUN_STEPS, steps, session.run.seed)
        by_step = dict(zip((step.name for step in steps), zip(*by_rank, strict=True), strict=True))
        for step in steps:
            session.say(
                "",
                *step_texts(
                    step.name, step.summary, by_step[step.name], lesson.says.get(step.name, ())
                ),
            )
        shown = (
            ", ".join(step.name for step in steps) if only else lesson.conclude(session.world.size)
        )
        session.say("", f"Shown: {shown}.")
        session.print_document(by_step)

    return command
