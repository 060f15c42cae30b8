"""Options that several commands share, and how they reach a command: packed into one object."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from playground.runtime.backends import BACKENDS
from playground.runtime.launch import MAX_RANKS
from playground.runtime.rendezvous import DEFAULT_TIMEOUT


class Finite(click.FloatRange):
    """A number in a range; neither NaN nor infinite, which a range alone lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


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
    help="Seconds without a sign of life from any rank after which the run is ended.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**32), default=1234, show_default=True, help="Seed for all random numbers."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """On how many ranks a command runs, how they meet, and how it shows what comes of it."""

    size: int | None = None
    backend: str = "gloo"
    timeout: float = DEFAULT_TIMEOUT
    seed: int = 1234
    init_method: str | None = None
    as_json: bool = False


run_options = pack_options(
    "run", RunOptions,
    click.option("-n", "--world-size", "size", type=click.IntRange(1, MAX_RANKS), help="Number of ranks."),
    click.option(
        "--backend", type=click.Choice(tuple(BACKENDS)), default="gloo", show_default=True,
        help=f"{'; '.join(f'{backend.name}: {backend.summary}' for backend in BACKENDS.values())}.",
    ),
    timeout_option,
    seed_option,
    click.option(
        "--init-method", metavar="URL",
        help="How ranks meet, instead of at our own store: env://, tcp://HOST:PORT or file:///PATH.",
    ),
    json_option,
)  # fmt: skip
"""Gives a command the argument `run`: its `RunOptions`."""


def plot_option(about: str) -> Callable[[Any], Any]:
    return click.option(
        "--plot", type=click.Path(path_type=Path), metavar="FILE", help=f"Also draw {about}: .svg or .png."
    )
