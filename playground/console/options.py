"""Options that several commands share, and how they reach a command: packed into one object."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import click

from playground.console.paths import FilePath
from playground.runtime.backends import BACKENDS
from playground.runtime.flags import Flag, flag, flags_of
from playground.runtime.launch import MAX_RANKS
from playground.runtime.rendezvous import DEFAULT_TIMEOUT

MEGABYTE = 2**20
Changes = Mapping[str, Mapping[str, Any]]
"""Arguments of `click.option`, by field."""


class Finite(click.FloatRange):
    """A number in a range; neither NaN nor infinite, which a range alone lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with contextlib.suppress(ValueError):  # of what is no number, the range tells
            if not math.isfinite(float(value)):
                self.fail(f"{value} is not a finite number.", param, ctx)
        return float(super().convert(value, param, ctx))


class Megabytes(Finite):
    """A number of units of 2^20 bytes, as bytes: DistributedDataParallel's bucket_cap_mb counts them so, too."""

    def __init__(self) -> None:
        super().__init__(0, 1e6, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return max(1, int(super().convert(value, param, ctx) * MEGABYTE))


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, in the order given."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def flags(kind: type[Any], *names: str, group: str = "", changes: Changes | None = None) -> Callable[[Any], Any]:
    """Options for these fields of a dataclass or, if none are named, for all flags of the group, as one decorator.

    `changes`: by field, arguments of `click.option` that differ from what the flag says.
    """
    known, hints = flags_of(kind), get_type_hints(kind)
    defaults: Mapping[str, Any] = {field.name: field.default for field in fields(kind)}
    made = []
    for name in names or [name for name in known if known[name].group == group]:
        about, value_type = known[name], without_none(hints[name])
        spellings = (about.name or f"--{name.replace('_', '-')}").split()
        arguments = {"help": about.help, "metavar": about.metavar, "type": type_of(about, value_type)}
        if value_type is bool:
            arguments["is_flag"] = True
        elif defaults[name] is not None:
            default = defaults[name] / MEGABYTE if about.in_megabytes else defaults[name]
            arguments |= {"default": default, "show_default": True}
        made.append(
            click.option(*spellings, name, **{**arguments, **(about.click or {}), **(changes or {}).get(name, {})})
        )
    return options(*made)


def without_none(hint: Any) -> Any:
    """The type of a field whose annotation may allow None, too."""
    return next((each for each in get_args(hint) if each is not NoneType), hint)


def type_of(flag: Flag, value_type: type) -> Any:
    """What click converts the values of an option to, and the range it allows; None for what click does by itself."""
    low, high = flag.least if flag.above is None else flag.above, flag.most if flag.below is None else flag.below
    if flag.in_megabytes:
        return Megabytes()
    if flag.choices is not None:
        return click.Choice(tuple(flag.choices))
    if value_type is int:
        return click.IntRange(cast("int", low), cast("int", high))
    if value_type is float:
        return Finite(low, high, min_open=flag.above is not None, max_open=flag.below is not None)
    return FilePath() if value_type is Path else None


def pack_options(
    name: str, kind: type[Any], *decorators: Callable[[Any], Any], changes: Changes | None = None
) -> Callable[[Any], Any]:
    """The flags of a dataclass, then further options, as one decorator. Their values reach the command as its argument
    `name`: a `kind`, whose fields are called as the options' values are."""
    names = [field.name for field in fields(kind)]

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_packed(*args: Any, **values: Any) -> Any:
            return command(*args, **{name: kind(**{each: values.pop(each) for each in names})}, **values)

        return options(flags(kind, changes=changes), *decorators)(with_packed)

    return decorate


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many ranks a command runs on, how they meet, and how it shows its results."""

    size: int | None = flag(None, "Number of ranks.", least=1, most=MAX_RANKS, name="-n --world-size")
    backend: str = flag(
        "gloo", f"{'; '.join(f'{backend.name}: {backend.summary}' for backend in BACKENDS.values())}.", choices=BACKENDS
    )
    timeout: float = flag(
        DEFAULT_TIMEOUT, "Seconds after which a run is ended in which no rank gives a sign of life.", above=0, below=1e6
    )
    seed: int = flag(1234, "Seed of the random number generators.", least=0, most=2**32)
    init_method: str | None = flag(
        None, "How the ranks meet, instead of at our own store: env://, tcp://HOST:PORT or file:///PATH.", metavar="URL"
    )
    wide: bool = flag(False, "Show all columns of every table, even if lines get wider than the terminal.")
    as_json: bool = flag(False, "Print one JSON document instead of text.", name="--json")
    see: Path | None = flag(
        None,
        "Record what the ranks do, and paint it: .html plays it, .svg and .png are pictures, .txt says it in words, "
        ".json is a trace for Perfetto, .playground keeps the recording for `see`.",
        metavar="FILE",
    )


def run_options(default_size: int) -> Callable[[Any], Any]:
    """Gives a command the argument `run`: its `RunOptions`. `default_size` is what --help says of -n."""
    return pack_options("run", RunOptions, changes={"size": {"show_default": str(default_size)}})


def plot_option(about: str) -> Callable[[Any], Any]:
    return click.option("--plot", type=FilePath(), metavar="FILE", help=f"Also draw {about}: .svg or .png.")
