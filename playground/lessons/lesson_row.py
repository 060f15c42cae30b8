"""What the table of lessons says of each. Imports nothing but the table's needs: every program that
imports a given file loads it."""

from __future__ import annotations

from dataclasses import dataclass

from playground.base.remote import docstrings

ON_THE_PATH = "The path, in order"


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A row of the path: a program in a folder of its own, with all else about it. Its command runs
    the program, as `run` runs a script."""

    name: str
    """Its command."""
    package: str
    """The package in which its folder is."""
    teaches: str
    """One line for the path."""
    needs_mnist: bool = False
    """Whether MNIST, or digits, must be on this host before its ranks start."""
    restarts: int = 0
    """How often its ranks are started again when one fails."""
    default_size: int
    """World size unless the user asks for another."""
    folder: str = ""
    """Where it lies, if its command has another name."""
    part: str = ON_THE_PATH
    """Title of the part of the course that it belongs to."""

    @property
    def path(self) -> str:
        folder = self.folder or self.name.replace("-", "_")
        return f"{self.package.replace('.', '/')}/{folder}"

    @property
    def module(self) -> str:
        """Its program, as a module."""
        return f"{self.path.replace('/', '.')}.lesson"

    @property
    def help(self) -> str:
        """The docstring of the lesson, for click, which would fill indented lines as if they were
        prose."""
        return docstrings(self.module)[""].replace("\n\n    ", "\n\n\b\n    ")
