"""What several commands share: options, their types, and who prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from playground.lessons import about
from playground.runtime.backends import BACKENDS
from playground.runtime.entry import World
from playground.runtime.launch import MOST_RANKS
from playground.runtime.rendezvous import DEFAULT_TIMEOUT

ALL_REDUCES = (
    "backend", "reduce-broadcast", "all-to-all", "tutorial-ring", "ring", "recursive-doubling", "halving-doubling",
    "binary-tree", "auto",
)  # fmt: skip
"""What adds up over ranks: the backend's own all-reduce, and ours."""


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


timeout_option = click.option(
    "--timeout", type=Finite(0, 1e6, min_open=True, max_open=True), default=DEFAULT_TIMEOUT, show_default=True,
    help="Seconds without a sign of life from any rank after which the run is ended.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**32), default=1234, show_default=True, help="Of all random numbers."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
world_options = options(
    click.option("-n", "--world-size", "size", type=click.IntRange(1, MOST_RANKS), help="Number of ranks."),
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


def plot_option(about: str) -> Callable[[Any], Any]:
    return click.option(
        "--plot", type=click.Path(path_type=Path), metavar="FILE", help=f"Also draw {about}: .svg or .png."
    )


all_reduce_option = click.option(
    "--all-reduce", type=click.Choice(ALL_REDUCES), default="backend", show_default=True,
    help="What adds gradients up: the backend's own or one of ours.",
)  # fmt: skip


def bucket_cap_of(megabytes: float) -> Callable[[Any], Any]:
    """The option, with a default."""
    return click.option(
        "--bucket-cap-mb", type=Finite(0, 1e6, min_open=True), default=megabytes, show_default=True, metavar="MB",
        help="A bucket of gradients is full once it holds so much.",
    )  # fmt: skip


bucket_cap_option = bucket_cap_of(25.0)


def help_of(lesson: str) -> str:
    """What a lesson says about itself, for click, which would fill lines that are indented as if they were prose."""
    return about(lesson)[""].replace("\n\n    ", "\n\n\b\n    ")


def speaker(world: World, silent: bool) -> Callable[[str], None]:
    """Prints, if this process is to speak and text is wanted."""
    return click.echo if world.speaks and not silent else lambda text: None
