"""A lesson as the command line knows it: before torch, and before any module of the lesson, is imported."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, module_exists, outline, remote


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A row of the path. Everything else about a lesson lies in its folder."""

    name: str
    """Its command."""
    teaches: str
    """One line for the path."""
    shown: str
    """What the last line of its output says has been shown: `conclude` fills it in."""
    default_size: int
    """World size unless the user asks for another."""
    min_size: int = 1
    """Smallest world in which it makes sense."""
    says: str = ""
    """A line each rank has to say after a step that leaves it with `before` and `after`, as tutorials print it."""
    folder: str = ""
    """Where it lies, if its command has another name."""

    @property
    def path(self) -> str:
        """Its folder, seen from the top of the repository."""
        return f"playground/lessons/{self.folder or self.name.replace('-', '_')}"

    def module(self, part: str = "lesson") -> str:
        """The name of one of its modules."""
        return f"{self.path.replace('/', '.')}.{part}"

    @property
    def command(self) -> Remote | None:
        """Its command, if it has one of its own; without one it is a row of steps."""
        part = next((part for part in ("page", "command") if module_exists(self.module(part))), None)
        return self.remote("command", part) if part else None

    def conclude(self, size: int, **values: str) -> str:
        """What has been shown, on a world of this size; `values`: further fields of `shown`."""
        return self.shown.format(ranks=f"{size} rank{'s' * (size > 1)}", **values)

    def remote(self, function: str, part: str = "lesson") -> Remote:
        return remote(f"{self.module(part)}:{function}")

    @property
    def steps(self) -> tuple[str, ...]:
        """The functions of `lesson.py` that ranks run, in order."""
        return outline(self.module()).rank_functions

    @property
    def help(self) -> str:
        """What the lesson says about itself, for click, which would fill lines that are indented as if prose."""
        return outline(self.module()).docstrings[""].replace("\n\n    ", "\n\n\b\n    ")

    @property
    def texts(self) -> dict[str, str]:
        """What its steps say about themselves."""
        return outline(self.module()).docstrings
