"""Options that several commands share, and how they reach a command: packed into one object."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from playground.console.paths import FilePath
from playground.runtime.backends import BACKENDS
from playground.runtime.launch import MAX_RANKS
from playground.runtime.rendezvous import DEFAULT_TIMEOUT


class Finite(click.FloatRange):
    """A number in a range; neither NaN nor infinite, which a range alone lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with contextlib.suppress(ValueError):  # of what is no number, the range tells
            if not math.isfinite(float(value)):
                self.fail(f"{value} is not a finite number.", param, ctx)
        return float(super().convert(value, param, ctx))


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, in the order given."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def pack_options(name: str, kind: type[Any], *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator. Their values reach the command as its argument `name`: a `kind`, a
    dataclass whose fields are called as the options' values are."""
    names = [field.name for field in fields(kind)]

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_packed(*args: Any, **values: Any) -> Any:
            return command(*args, **{name: kind(**{each: values.pop(each) for each in names})}, **values)

        return options(*decorators)(with_packed)

    return decorate


timeout_option = click.option(
    "--timeout", type=Finite(0, 1e6, min_open=True, max_open=True), default=DEFAULT_TIMEOUT, show_default=True,
    help="Seconds after which a run is ended in which no rank gives a sign of life.",
)  # fmt: skip
seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**32),
    default=1234,
    show_default=True,
    help="Seed of the random number generators.",
)
wide_option = click.option(
    "--wide", is_flag=True, help="Show all columns of every table, even if lines get wider than the terminal."
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")

see_option = click.option(
    "--see", type=FilePath(), metavar="FILE",
    help="Record what the ranks do, and paint it: .html plays it, .svg and .png are pictures, .txt says it in words, "
    ".json is a trace for Perfetto, .playground keeps the recording for `see`.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How many ranks a command runs on, how they meet, and how it shows its results."""

    size: int | None = None
    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT
    seed: int = 1234
    init_method: str | None = None
    wide: bool = False
    as_json: bool = False
    see: Path | None = None


def run_options(default_size: int) -> Callable[[Any], Any]:
    """Gives a command the argument `run`: its `RunOptions`. `default_size` is what --help says of -n."""
    return pack_options(
        "run", RunOptions,
        click.option(
            "-n", "--world-size", "size", type=click.IntRange(1, MAX_RANKS), show_default=str(default_size),
            help="Number of ranks.",
        ),
        click.option(
            "--backend", type=click.Choice(tuple(BACKENDS)), default="gloo", show_default=True,
            help=f"{'; '.join(f'{backend.name}: {backend.summary}' for backend in BACKENDS.values())}.",
        ),
        timeout_option,
        seed_option,
        click.option(
            "--init-method", metavar="URL",
            help="How the ranks meet, instead of at our own store: env://, tcp://HOST:PORT or file:///PATH.",
        ),
        wide_option,
        json_option,
        see_option,
    )  # fmt: skip


def plot_option(about: str) -> Callable[[Any], Any]:
    return click.option("--plot", type=FilePath(), metavar="FILE", help=f"Also draw {about}: .svg or .png.")
