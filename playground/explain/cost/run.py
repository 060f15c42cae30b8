"""`--profile` and `--link`: a run whose communication is measured, or goes over a simulated link.
Does not import torch: the ranks do.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.base.errors import UsageError
from playground.base.files import temporary_folder, write_file
from playground.base.remote import remote
from playground.base.untrusted import printable
from playground.base.upstream import find_older_torch
from playground.explain.cost.log import read_ranks
from playground.explain.cost.page import RENDERERS
from playground.explain.cost.profile import Profile
from playground.explain.cost.report import profile_texts
from playground.explain.starts import folder_of_last_start, folder_of_this_start, require_own_ranks
from playground.ui import terminal
from playground.ui.paths import check_writable
from playground.world.command_world import Around, CommandWorld
from playground.world.rank.assignment import call

METERED = remote("playground.explain.cost.meter:metered")
FLAG = "--profile"
TELLS_OF_NATIVE_CALLS = 2, 14
"""The first torch whose process groups tell of calls in C++."""
TERMINAL = Path("-")
"""In the place of a file: the table is shown on the terminal."""


@dataclass(frozen=True)
class Metered:
    """Calls `fn`, measures its communication into `folder`, and has it go over a link of `gbit`."""

    fn: Callable[..., Any]
    folder: Path | None
    gbit: float | None

    def __call__(self, rank: int, size: int, *args: Any) -> Any:
        with METERED(self.folder and folder_of_this_start(self.folder), rank, self.gbit):
            return call(self.fn, rank, size, *args)


def tell_what_torch_does_not() -> None:
    """Say what an older torch does not tell, and is thus neither counted nor delayed."""
    if found := find_older_torch(TELLS_OF_NATIVE_CALLS):
        since = ".".join(map(str, TELLS_OF_NATIVE_CALLS))
        click.echo(
            f"playground: torch {found} does not tell of calls in C++: what DDP and functional "
            f"collectives send is left out (torch {since} tells it)",
            err=True,
        )


def measured(world: CommandWorld, profile: Path | None, gbit: float | None) -> Around:
    """What the world's runs are to happen in, if their communication is to be measured, or to go
    over a link of so many 10^9 bits per second. Raises `UsageError` for a file that cannot be
    written, for a profile of ranks that somebody else has started, and for a link of GPUs."""
    if profile:
        require_own_ranks(FLAG, world)
    if gbit and world.device != "cpu":
        raise UsageError(f"--link {gbit:g}: the simulation delays CPUs, on gloo: leave it out")
    if profile and profile != TERMINAL:
        if profile.suffix not in RENDERERS:
            raise UsageError(
                f"{FLAG} {profile}: choose an ending from {', '.join(RENDERERS)}, or leave the "
                "file out"
            )
        check_writable(FLAG, profile)
    tell_what_torch_does_not()
    outer, file = world.around, profile and (profile if profile == TERMINAL else profile.absolute())

    @contextlib.contextmanager
    def around(world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        world.warm_up(METERED)
        if file is None:
            with outer(world, Metered(fn, None, gbit)) as run:
                yield run
            return
        with temporary_folder("profile") as folder:
            try:
                with outer(world, Metered(fn, folder, gbit)) as run:
                    yield run
            finally:
                show(folder, world, file)

    return around


def show(folder: Path, world: CommandWorld, file: Path) -> None:
    """Show the profile of the last world that has begun, on stderr or in a file."""
    ranks = read_ranks(folder_of_last_start(folder), world.size, time.monotonic())
    found = Profile(tuple(sys.argv[1:]), world.backend, ranks)
    if not found.seconds:
        click.echo(f"{FLAG}: no rank has begun", err=True)
    elif file == TERMINAL:
        terminal.say(*profile_texts(found), err=True)
    else:
        try:
            write_file(file, RENDERERS[file.suffix](found).encode())
        except OSError as error:
            click.echo(f"{FLAG}: {file} cannot be written: {error.strerror}", err=True)
            return
        click.echo(f"{FLAG}: {printable(file.name)}: {found.conclude()}", err=True)
