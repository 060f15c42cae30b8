"""One run of a command: its world, what it says, and the document it ends with."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import click

from playground.console import terminal
from playground.console.options import RunOptions
from playground.console.tables import Column, Rows, Text
from playground.console.terminal import Bar
from playground.runtime.errors import UsageError
from playground.runtime.launcher.entry import Around, CommandWorld


def to_document(content: Mapping[str, object]) -> str:
    """One JSON document. A number that JSON has no word for (a diverged loss is NaN) becomes null."""
    return json.dumps(to_json_safe(content), allow_nan=False)


def to_json_safe(value: object) -> object:
    """`value` made of what JSON has: dataclasses as objects with the fields that `repr` shows, tuples as lists, paths
    as text."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = (field.name for field in fields(value) if field.repr)
        return {name: to_json_safe(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {str(name): to_json_safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


_recorders: list[Callable[[Path], Around]] = []


def record_with(recorder: Callable[[Path], Around]) -> None:
    """Install what `--see FILE` does: `recorder(file)` returns what every run of a world happens in."""
    _recorders[:] = [recorder]


class Session:
    """Raises `UsageError` if there can be no such world; nothing is started before `world.run`."""

    def __init__(
        self, name: str, run: RunOptions, *, default_size: int = 2, min_size: int = 1, restarts: int = 0
    ) -> None:
        if run.wide and run.as_json:
            raise UsageError("--wide is for tables and --json prints none: leave one of them out")
        self.started = time.perf_counter()
        self.name, self.run = name, run
        self.world = CommandWorld(
            run.size,
            default_size=default_size,
            min_size=min_size,
            backend=run.backend,
            timeout=run.timeout,
            init_method=run.init_method,
            restarts=restarts,
        )
        if run.see:
            self.world.around = _recorders[-1](run.see)

    def say(self, *texts: Text) -> None:
        """Print each on lines of its own, if this process is the one that shows results and text is wanted."""
        if self.world.is_main and not self.run.as_json:
            terminal.say(*texts, wide=self.run.wide)

    def rows(self, *columns: Column) -> Rows:
        """A table whose rows are said one by one: see `Rows`."""
        return Rows(self.say, *columns)

    def bar(self) -> Bar:
        """A bar for long work, shown by the process that shows results: see `Bar`."""
        return Bar(shown=self.world.is_main)

    def print_document(self, steps: Mapping[str, Sequence[object]], **more: object) -> None:
        """End with one JSON document, if that is wanted. `steps`: by name, the results of each step, rank by rank;
        dataclasses become objects with their fields."""
        if self.run.as_json and self.world.is_main:
            world, seconds = self.world, round(time.perf_counter() - self.started, 3)
            about = {"backend": world.backend, "device": world.device, "world_size": world.size, "seconds": seconds}
            rows = [{"name": name, "ranks": list(ranks)} for name, ranks in steps.items()]
            click.echo(to_document({"lesson": self.name, **about, "steps": rows, **more}))
