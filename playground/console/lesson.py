"""What the table of lessons says of each. Imports nothing but the table's needs: every board that
imports another loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from playground.console.units import plural
from playground.runtime.remote import Remote, docstrings, module_exists, rank_functions, remote

if TYPE_CHECKING:
    import click

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
    is_program: bool = False
    """Whether its command runs `lesson.py` as it is, as `run` runs a script. Its options, and
    what is shown, are then the program's."""
    needs_mnist: bool = False
    """Whether MNIST, or digits, must be on this host before its ranks start."""
    shown: str = ""
    """Conclusion in the last line of its output, with values of the run: `conclude` fills them in.
    Those of a row of steps are by step and rank: {scatter[0][after]}."""
    default_size: int
    """World size unless the user asks for another."""
    min_size: int = 1
    """Smallest world in which it makes sense."""
    brief: Sequence[str] = ()
    """Steps that are shown; the others with --wide or --only. All, if it is empty."""
    says: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines each rank has to say after a step, by the step's name, as tutorials print them."""
    options: Sequence[str] = ()
    """Those of every run that it has: fields of `RunOptions`; without any, the common ones."""
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
        return self.remote("command", "page") if module_exists(self.module("page")) else None

    def conclude(self, size: int, **values: object) -> str:
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
        return [] if self.is_program else [*rank_functions(self.module()), *self.further]

    @property
    def help(self) -> str:
        """The docstring of the lesson, for click, which would fill indented lines as if they were
        prose."""
        return docstrings(self.module())[""].replace("\n\n    ", "\n\n\b\n    ")

    def run_by(
        self, *decorators: Callable[[Any], Any]
    ) -> Callable[[Callable[..., None]], click.Command]:
        """A decorator that makes a function the command of the lesson: see `session_command`."""
        from playground.console.options import COMMON
        from playground.console.session import session_command

        size, least, only = self.default_size, self.min_size, self.options or COMMON
        return session_command(
            self.name, *decorators, only=only, size=size, min_size=least,
            help=self.help, short_help=self.teaches,
        )  # fmt: skip
