"""`--check`: a run whose training is checked for silent mistakes. Does not import torch: the ranks
do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from playground.base.errors import RankFailed, RankTimeout
from playground.base.files import common_folder, temporary_folder
from playground.base.remote import remote
from playground.explain.right import HINTS, STRICT
from playground.explain.right.checked import NEEDED, Checked
from playground.explain.right.early import SHARE_IN_A_RANK, EarlyTeller
from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import HINT, Finding
from playground.explain.right.log import BETWEEN_LOOKS, LIMIT, LIMIT_OF_FAILED, file_name
from playground.explain.right.printed import find_printed
from playground.explain.right.reading import has_ended, read_ranks
from playground.explain.right.report import tell_all
from playground.explain.right.rules import find_mistakes
from playground.explain.starts import folder_of_last_start, folder_of_this_start
from playground.world.command_world import Around, CommandWorld
from playground.world.rendezvous.environment import RankEnv, name_of_torchrun

NOT_CERTAIN = "playground: --check strict: nothing was certain: the exit code stays the script's"
GATHER = remote("playground.explain.right.gathering:gather_logs")


@dataclass(frozen=True, repr=False)
class CheckedByRank0(Checked):
    """The same in a rank that somebody else has started: when the program has ended, rank 0 tells
    what is wrong on all ranks."""

    env: RankEnv
    mode: str
    verdicts: list[bool]
    """Rank 0 adds whether something certainly is wrong."""

    @cached_property
    def teller(self) -> EarlyTeller:
        """It tells nothing before it has begun."""
        return EarlyTeller(self.folder, self.env.size, SHARE_IN_A_RANK)

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
            try:
                self.gather(folder, has_failed=has_failed)
            finally:  # torchrun may end this rank meanwhile, as another one was killed
                if rank == 0:
                    facts = read_ranks(folder, size)
                    told = show(facts, self.mode, self.teller, has_failed=has_failed)
                    self.verdicts.append(told)

    def gather(self, folder: Path, *, has_failed: bool) -> None:
        """Bring the logs of all ranks into the folder of rank 0."""
        GATHER(folder, self.env, has_failed=has_failed)


@dataclass(frozen=True, repr=False)
class CheckedOnOneHost(CheckedByRank0):
    """The same if all ranks write into one folder, also those that are killed: rank 0 tells what is
    certain while the program runs, too."""

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        if rank:
            return super().__call__(rank, size, *args)
        with self.teller:
            return super().__call__(rank, size, *args)

    def gather(self, folder: Path, *, has_failed: bool) -> None:
        if self.env.rank == 0:
            await_ends(folder, self.env.size, LIMIT_OF_FAILED if has_failed else LIMIT)
            self.teller.stop()


def checked(world: CommandWorld, mode: str) -> Around:
    """What the world's runs are to happen in, so that they are checked."""
    outer = world.around

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(*NEEDED)
        verdicts: list[bool] = []
        with contextlib.ExitStack() as stack:
            run, env = fn, world.rank_env
            if env and (folder := enter_folder_of_host(stack, env)):
                run = CheckedOnOneHost(fn, folder, env, mode, verdicts)
            elif (folder := enter_folder(stack)) and env:
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
    has_failed = False
    try:
        with teller:
            yield
    except (RankFailed, RankTimeout):
        has_failed = True
        raise
    finally:
        facts = read_ranks(folder_of_last_start(folder), size)
        verdicts.append(show(facts, mode, teller, has_failed=has_failed))


def enter_folder(stack: contextlib.ExitStack) -> Path | None:
    """A folder for the logs of ranks, until the stack is closed; None where none can be made: then
    nothing is checked."""
    try:
        return stack.enter_context(temporary_folder("check"))
    except OSError:
        return None


def enter_folder_of_host(stack: contextlib.ExitStack, env: RankEnv) -> Path | None:
    """The folder for the logs of ranks that one torchrun has started, all on this host; None if
    these are not all ranks, or if it cannot be made."""
    name = name_of_torchrun()
    if not name or env.local_size < env.size:
        return None
    try:
        return stack.enter_context(common_folder(f"check-{name}"))
    except OSError:
        return None


def await_ends(folder: Path, size: int, seconds: float) -> None:
    """Wait until the programs of all ranks but rank 0 have ended, for so long at most."""
    end = time.monotonic() + seconds
    for rank in range(1, size):
        while not has_ended(folder / file_name(rank)) and time.monotonic() < end:
            time.sleep(BETWEEN_LOOKS)


def find_mistakes_of(folder: Path, size: int) -> list[Finding]:
    """What is wrong in the last start of a world whose ranks were `Checked`, the certain first."""
    return find_mistakes(read_ranks(folder_of_last_start(folder), size))


def show(
    facts: list[RankFacts], mode: str, teller: EarlyTeller, *, has_failed: bool = False
) -> bool:
    """Tell what is wrong, on stderr: of what the teller has told, the first sentence, and nothing
    of what it has told a moment ago unless hints are told, too. Returns whether something certainly
    is wrong, a missing wait on a simulated GPU included: the GPU has told of that."""
    is_unordered = any(each.races for each in facts)
    try:
        found = [*find_mistakes(facts), *(find_printed(facts) if mode == HINTS else ())]
    except Exception as error:  # what a rule does not expect is no reason for the run to fail
        why = f"{type(error).__name__}: {error}"
        click.echo(f"playground: the check for silent mistakes has failed ({why})", err=True)
        return is_unordered
    if mode == HINTS:
        told = tell_all(found, facts, teller.is_told, has_failed=has_failed)
        click.echo(told, err=True)
    elif new := [each for each in found if each.level is not HINT and not teller.is_recent(each)]:
        click.echo(tell_all(new, is_told=teller.is_told), err=True)
    is_wrong = is_unordered or any(each.is_certain for each in found)
    if mode == STRICT and not is_wrong and any(each.level is not HINT for each in found):
        click.echo(f"\n{NOT_CERTAIN}", err=True)
    return is_wrong
