"""Options that take several names of a table, with commas between them, or `all`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import click

ALL = "all"


def names_option(*flags: str, known: Collection[str], default: Sequence[str], help: str) -> Callable[[Any], Any]:
    """A click option whose value is the words given, each in `known` or `ALL`; empty if it is left out.

    `default` is what --help says that leaving it out means. `select_names` makes names of the words.
    """
    return click.option(
        *flags, callback=partial(check_names, known), shell_complete=partial(complete_names, known), multiple=True,
        metavar="NAME,…", show_default=",".join(default), help=f"{help}: {', '.join(known)} or {ALL}.",
    )  # fmt: skip


def check_names(
    known: Collection[str], ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    words = tuple(word.strip() for text in texts for word in text.split(","))
    for word in words:
        if word not in (*known, ALL):
            raise click.BadParameter(f"{word!r} is none of {', '.join(known)}, {ALL}.")
    return words


def complete_names(known: Collection[str], ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """What the shell may make of `incomplete`: its last word completed, by names that are not there yet."""
    before, comma, word = incomplete.rpartition(",")
    names = [name for name in (*known, ALL) if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in names if name.startswith(word)]


def select_names(known: Collection[str], words: Sequence[str]) -> tuple[str, ...]:
    """The names in `known` that `words` ask for, in the order of `known`, each once."""
    return tuple(name for name in known if name in words or ALL in words)
