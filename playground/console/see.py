"""`--see FILE`: what the ranks of a command do, recorded, and painted when they are done."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from playground.console.files import check_writable
from playground.figures.paint import PAINTED, check_ending, paint
from playground.recording.layout import TABLES
from playground.recording.merge import merge
from playground.recording.recorded import RECORD, Recorded
from playground.recording.recording import Recording
from playground.recording.run import collect, pack, write_run
from playground.runtime.entry import World
from playground.runtime.environment import restart_count
from playground.runtime.errors import PlaygroundError

FLAG = "--see"
KEPT = ".playground"
"""The ending of a recording itself."""


class Recordings:
    """One for each world of a command: the first goes to the file that was asked for, the others beside it, numbered.

    Raises `UsageError` for an ending that says nothing, or a file that cannot be written.
    """

    def __init__(self, file: Path) -> None:
        check_ending(file, (KEPT, *PAINTED), FLAG)
        check_writable(FLAG, file)
        self.file = file.absolute()
        self.folder = file.absolute().with_name(f"{file.name}.ranks")
        """Where ranks write to. It is left only if nobody is there to make a file of it: it can be seen as it is."""
        self.worlds = self.written = 0

    @contextlib.contextmanager
    def around(self, world: World, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """What the ranks of `world` are to run in place of `fn`, in this block, after which there is a recording."""
        self.worlds += 1
        folder = self.folder / str(self.worlds)
        command = sys.argv[1:]
        if world.rank_env is None:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main:
            write_run(folder / str(restart_count()), command, world.backend, world.size)
        world.warm_up(RECORD)
        try:
            yield Recorded(fn, folder)
        except BaseException:
            with contextlib.suppress(PlaygroundError, OSError):  # what went wrong first is what is told
                self.write_all(folder, command, world)
            raise
        self.write_all(folder, command, world)

    def write_all(self, folder: Path, command: list[str], world: World) -> None:
        """Make files of what one world has recorded, and of each before it whose place it took. Rank 0, or whoever has
        started the ranks, does it."""
        if not world.is_main:
            return
        for attempt in sorted(folder.iterdir(), key=lambda each: int(each.name)):
            if any(attempt.glob(f"*.{TABLES}")):
                write_run(attempt, command, world.backend, world.size)
                self.write(attempt)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is something else in it
            self.folder.rmdir()

    def write(self, folder: Path) -> None:
        self.written += 1
        file = self.file if self.written == 1 else self.file.with_stem(f"{self.file.stem}-{self.written}")
        if file.suffix == KEPT:
            recording = pack(folder, file)
        else:
            recording = merge(collect(folder))
            paint(recording, file)
        click.echo(f"{FLAG}: {file.name} shows {describe(recording)}", err=True)


def describe(recording: Recording) -> str:
    """How much of a run was recorded, in one line."""
    events = sum(len(rank.events) for rank in recording.ranks)
    dropped = sum(rank.dropped for rank in recording.ranks)
    cut_off = [str(rank.rank) for rank in recording.ranks if rank.is_cut_off]
    bound = max(rank.clock_bound for rank in recording.ranks)
    parts = [f"{events:,} events of {recording.size} rank{'s' * (recording.size > 1)}"]
    if dropped:
        parts.append(f"{dropped:,} more found no room")
    if cut_off:
        parts.append(f"cut off on rank{'s' * (len(cut_off) > 1)} {', '.join(cut_off)}")
    if bound:
        parts.append(f"clocks agree within {bound * 1e6:.0f} µs")
    return ", ".join(parts)
