"""One run of a command: its world, what it says, and the document it ends with. What runs a world
is imported when a world is needed: a command that only tells its options does without."""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from playground.base import signals
from playground.base.errors import RankFailed, RankTimeout
from playground.ui import terminal
from playground.ui.commands import Command
from playground.ui.options import options, pack_options
from playground.ui.run_options import COMMON, RunOptions
from playground.ui.terminal import Bar

if TYPE_CHECKING:
    from playground.explain.hang.wording import Diagnosis
    from playground.ui.tables import Text
    from playground.world.command_world import Around, CommandWorld
    from playground.world.rank.reports import Event, Progress


def to_document(content: Mapping[str, object], indent: int | None = None) -> str:
    """One JSON document, in a line unless it is indented. A number that JSON has no word for (a
    diverged loss is NaN) becomes null."""
    return json.dumps(to_json_safe(content), allow_nan=False, indent=indent)


def to_json_safe(value: object) -> object:
    """`value` made of what JSON has: dataclasses as objects with the fields that `repr` shows,
    tuples as lists, paths as text."""
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


_record: Callable[[Path], Around] | None = None


def record_with(recorder: Callable[[Path], Around]) -> None:
    """Install what `--see FILE` does: `recorder(file)` returns what every run of a world happens
    in."""
    global _record
    _record = recorder


@dataclass(frozen=True)
class Ending:
    """How a run has ended that may fail."""

    results: Sequence[Any] | None
    """The return value of each rank; None if `launch` raised."""
    error: RankFailed | RankTimeout | None
    diagnosis: Diagnosis | None
    """That of the error, or that of a warning."""


def run_to_its_end(world: CommandWorld, fn: Callable[..., Any], *args: Any, **how: Any) -> Ending:
    """Run a function whose ranks may fail or stand still, and keep what is said about them.
    Arguments: see `CommandWorld.run`."""
    from playground.explain.hang.wording import Diagnosis

    logger, warnings = logging.getLogger("playground"), BufferingHandler(sys.maxsize)
    results, error = None, None
    logger.addHandler(warnings)
    try:
        results = world.run(fn, *args, **how)
    except (RankFailed, RankTimeout) as failed:
        error = failed
    finally:
        logger.removeHandler(warnings)
    said = (record.msg for record in warnings.buffer if isinstance(record.msg, Diagnosis))
    return Ending(results, error, error.diagnosis if error else next(said, None))


class Session:
    """A run of the command `name`, and the bar that shows what takes long. Its world is made when
    it is first used, from the options `run`, `default_size` (in place of a size that was not
    given), `min_size` and `restarts`, which may change until then; that raises `UsageError` if
    there can be no such world. No rank is started before `launch`."""

    def __init__(
        self, name: str, run: RunOptions, *, default_size: int = 2, min_size: int = 1
    ) -> None:
        self.started = time.perf_counter()
        self.name = name
        self.run = run
        self.default_size = default_size
        self.min_size = min_size
        self.restarts = 0
        self.bar = Bar(shown=signals.speaks())

    @functools.cached_property
    def world(self) -> CommandWorld:
        from playground.world.command_world import CommandWorld  # not for --help

        world = CommandWorld(
            self.run.size,
            default_size=self.default_size,
            min_size=self.min_size,
            backend=self.run.backend,
            timeout=self.run.timeout,
            restarts=self.restarts,
        )
        if self.run.see:
            assert _record  # app.py has installed it
            world.around = _record(self.run.see)
        return world

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        on_report: Progress | None = None,
        **how: Any,
    ) -> list[Any]:
        """The return value of `function(rank, size, *args)` on each rank, in rank order. The bar
        shows what rank 0 reports; `on_report` hears of it first. Other arguments, and what it
        raises: see `CommandWorld.run`."""

        def forward(rank: int, event: Event) -> None:
            if on_report:
                on_report(rank, event)
            self.bar(rank, event)

        self.bar.show(f"starting {self.world.size} ranks")
        try:
            return self.world.run(function, *args, on_report=forward, **how)
        finally:
            self.bar.clear()

    def say(self, *texts: Text) -> None:
        """Print each on lines of its own, if this process is the one that shows results and text is
        wanted."""
        if self.world.is_main and not self.run.as_json:
            terminal.say(*texts, wide=self.run.wide)

    def print_document(self, steps: Mapping[str, Sequence[object]], **more: object) -> None:
        """End with one JSON document, if that is wanted. `steps`: by name, the results of each
        step, rank by rank; dataclasses become objects with their fields."""
        if self.run.as_json and self.world.is_main:
            world, seconds = self.world, round(time.perf_counter() - self.started, 3)
            about = {
                "backend": world.backend,
                "device": world.device,
                "world_size": world.size,
                "seconds": seconds,
            }
            rows = [{"name": name, "ranks": list(ranks)} for name, ranks in steps.items()]
            click.echo(to_document({"lesson": self.name, **about, "steps": rows, **more}))


def session_command(
    name: str,
    *decorators: Callable[[Any], Any],
    only: Sequence[str] = COMMON,
    size: int = 2,
    min_size: int = 1,
    kind: type[Command] = Command,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
    **about: Any,
) -> Callable[[Callable[..., None]], Any]:
    """A decorator that makes a function the command `name`, with those options of every run that
    are named by `only`, and then with `decorators`. The function is called with the `Session` of
    the run, of `size` ranks unless more or fewer are asked for, and with the values of
    `decorators`. `changed` is what is different about options of every run: see `flags`. `kind` is
    the class of the command, `about` has further arguments of it."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def with_session(run: RunOptions, **values: Any) -> None:
            if run.gpus:
                from playground.ui.gpus import on_simulated_gpus  # few runs need it

                run = on_simulated_gpus(run)
            session = Session(name, run, default_size=size, min_size=min_size)
            with session.bar:
                function(session, **values)

        of_size = {"shown_default": str(size), "least": min_size}
        pack = pack_options("run", RunOptions, *only, changed={"size": of_size, **(changed or {})})
        make: Callable[..., Any] = click.command(name, kind, **about)
        return make(options(pack, *decorators)(with_session))

    return decorate
