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

from playground.explain.right import RankFacts, read_ranks
from playground.explain.right.report import tell_all
from playground.explain.right.rules import find_mistakes
from playground.runtime.errors import UsageError
from playground.runtime.files import temporary_folder
from playground.runtime.launcher.entry import Around, CommandWorld
from playground.runtime.rank.work import call
from playground.runtime.remote import remote
from playground.runtime.rendezvous.environment import restart_count

CHECKED = remote("playground.explain.right.observer:checked")
OFF, CERTAIN, HINTS, STRICT = MODES = ("off", "certain", "hints", "strict")
"""Nothing is checked; what is certain is told; hints, too; what is certain ends the command with
code 1."""


@dataclass(frozen=True)
class Checked:
    """Calls `fn`, and writes what it does into a folder in `folder` whose name is the number of
    restarts of the world."""

    fn: Callable[..., Any]
    folder: Path

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with CHECKED(self.folder / str(restart_count()), rank):
            return call(self.fn, rank, size, *args)


def checked(world: CommandWorld, mode: str) -> Around:
    """What the world's runs are to happen in, if they are to be checked. Raises `UsageError` for
    ranks that somebody else has started."""
    outer = world.around
    if mode == OFF:
        return outer
    if world.rank_env is not None:
        raise UsageError(
            f"--check {mode} of ranks that were started elsewhere: let this command start them, "
            "with -n"
        )

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(CHECKED)
        with temporary_folder("check") as folder:
            try:
                with outer(world, Checked(fn, folder)) as run:
                    yield run
            finally:
                is_wrong = show(read_last(folder, world.size), mode)
        if is_wrong and mode == STRICT:
            raise click.exceptions.Exit(1)

    return around


def read_last(folder: Path, size: int) -> list[RankFacts]:
    """What the ranks of the last world that has begun have seen."""
    last = max((int(each.name) for each in folder.iterdir() if each.is_dir()), default=0)
    return read_ranks(folder / str(last), size)


def show(facts: list[RankFacts], mode: str) -> bool:
    """Tell what is wrong, on stderr. Returns whether something certainly is."""
    found = find_mistakes(facts)
    told = [each for each in found if each.is_certain or mode == HINTS]
    if told or mode != CERTAIN:
        click.echo(tell_all(told, facts), err=True)
    return any(each.is_certain for each in found)
