"""`--check`: a run whose training is checked for silent mistakes. Does not import torch: the ranks
do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.explain import CERTAIN, HINTS, STRICT
from playground.explain.right import RankFacts, read_ranks
from playground.explain.right.report import tell_all
from playground.explain.right.rules import find_mistakes
from playground.explain.starts import (
    folder_of_last_start,
    folder_of_this_start,
    require_own_ranks,
)
from playground.runtime.files import temporary_folder
from playground.runtime.launcher.entry import Around, CommandWorld
from playground.runtime.rank.work import call
from playground.runtime.remote import remote

CHECKED = remote("playground.explain.right.observer:checked")


@dataclass(frozen=True)
class Checked:
    """Calls `fn`, and writes what it does into `folder`."""

    fn: Callable[..., Any]
    folder: Path

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with CHECKED(folder_of_this_start(self.folder), rank):
            return call(self.fn, rank, size, *args)


def checked(world: CommandWorld, mode: str) -> Around:
    """What the world's runs are to happen in, so that they are checked. Raises `UsageError` for
    ranks that somebody else has started."""
    require_own_ranks(f"--check {mode}", world)
    outer = world.around

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(CHECKED)
        with temporary_folder("check") as folder:
            try:
                with outer(world, Checked(fn, folder)) as run:
                    yield run
            finally:
                is_wrong = show(read_ranks(folder_of_last_start(folder), world.size), mode)
        if is_wrong and mode == STRICT:
            raise click.exceptions.Exit(1)

    return around


def show(facts: list[RankFacts], mode: str) -> bool:
    """Tell what is wrong, on stderr. Returns whether something certainly is."""
    found = find_mistakes(facts)
    told = [each for each in found if each.is_certain or mode == HINTS]
    if told or mode != CERTAIN:
        click.echo(tell_all(told, facts), err=True)
    return any(each.is_certain for each in found)
