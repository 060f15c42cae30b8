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

from playground.explain import HINTS, STRICT
from playground.explain.right import HINT, Finding, RankFacts
from playground.explain.right.early import EarlyTeller
from playground.explain.right.reading import read_ranks
from playground.explain.right.report import tell_all
from playground.explain.right.rules import find_mistakes
from playground.explain.starts import folder_of_last_start, folder_of_this_start
from playground.runtime.files import temporary_folder
from playground.runtime.launcher.entry import Around, CommandWorld
from playground.runtime.rank.work import call
from playground.runtime.remote import remote
from playground.runtime.rendezvous.environment import RankEnv

CHECKED = remote("playground.explain.right.observer:checked")
GATHER = remote("playground.explain.right.gathering:gather_logs")


@dataclass(frozen=True)
class Checked:
    """Calls `fn`, and writes what it does into `folder`."""

    fn: Callable[..., Any]
    folder: Path

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with CHECKED(folder_of_this_start(self.folder), rank):
            return call(self.fn, rank, size, *args)

    def __repr__(self) -> str:
        return repr(self.fn)  # in messages


@dataclass(frozen=True, repr=False)
class CheckedByRank0(Checked):
    """The same in a rank that somebody else has started: when the program has ended, rank 0 tells
    what is wrong on all ranks."""

    env: RankEnv
    mode: str
    verdicts: list[bool]
    """Rank 0 adds whether something certainly is wrong."""

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        has_failed = True
        try:
            result = super().__call__(rank, size, *args)
            has_failed = False
            return result
        except SystemExit as error:
            has_failed = bool(error.code)
            raise
        finally:
            folder = folder_of_this_start(self.folder)
            GATHER(folder, self.env, has_failed=has_failed)
            if rank == 0:
                self.verdicts.append(show(read_ranks(folder, size), self.mode))


def checked(world: CommandWorld, mode: str) -> Around:
    """What the world's runs are to happen in, so that they are checked."""
    outer = world.around

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(CHECKED)
        verdicts: list[bool] = []
        with contextlib.ExitStack() as stack:
            run, env = fn, world.rank_env
            folder = enter_folder(stack)
            if folder and env:
                run = CheckedByRank0(fn, folder, env, mode, verdicts)
            elif folder:
                stack.enter_context(told(folder, world.size, mode, verdicts))
                run = Checked(fn, folder)
            yield stack.enter_context(outer(world, run))
        if True in verdicts and mode == STRICT:
            raise click.exceptions.Exit(1)

    return around


@contextlib.contextmanager
def told(folder: Path, size: int, mode: str, verdicts: list[bool]) -> Iterator[None]:
    """In this block and at its end, tell what is wrong on ranks that write into the folder. Adds
    whether something certainly is."""
    teller = EarlyTeller(folder, size)
    try:
        with teller:
            yield
    finally:
        facts = read_ranks(folder_of_last_start(folder), size)
        verdicts.append(show(facts, mode, teller.is_recent))


def enter_folder(stack: contextlib.ExitStack) -> Path | None:
    """A folder for the logs of ranks, until the stack is closed; None where none can be made: then
    nothing is checked."""
    try:
        return stack.enter_context(temporary_folder("check"))
    except OSError:
        return None


def find_mistakes_of(folder: Path, size: int) -> list[Finding]:
    """What is wrong in the last start of a world whose ranks were `Checked`, the certain first."""
    return find_mistakes(read_ranks(folder_of_last_start(folder), size))


def show(
    facts: list[RankFacts], mode: str, is_known: Callable[[Finding], bool] = lambda found: False
) -> bool:
    """Tell what is wrong, on stderr, but for what is known unless hints are told, too. Returns
    whether something certainly is wrong."""
    try:
        found = find_mistakes(facts)
    except Exception as error:  # what a rule does not expect is no reason for the run to fail
        why = f"{type(error).__name__}: {error}"
        click.echo(f"playground: the check for silent mistakes has failed ({why})", err=True)
        return False
    if mode == HINTS:
        click.echo(tell_all(found, facts), err=True)
    elif new := [each for each in found if each.level is not HINT and not is_known(each)]:
        click.echo(tell_all(new, facts), err=True)
    return any(each.is_certain for each in found)
