"""`--see FILE`: what the ranks of a command do, recorded, and painted when they are done."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
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
from playground.runtime.errors import PlaygroundError, UsageError

FLAG = "--see"
KEPT = ".playground"
"""The ending of a recording itself."""


class Recordings:
    """One for each world of a command: the first goes to the file that was asked for, the others into a folder beside
    it, numbered from 2 on; those of an earlier command are removed from there.

    Raises `UsageError` for an ending that says nothing, or a file that cannot be written.
    """

    def __init__(self, file: Path) -> None:
        check_ending(file, (KEPT, *PAINTED), FLAG)
        check_writable(FLAG, file)
        self.file = file.absolute()
        self.folder = self.file.with_name(f"{file.name}.ranks")
        """Where ranks write to. It is left only if nobody is there to make a file of it: it can be seen as it is."""
        self.others = self.file.with_name(f"{file.name}.worlds")
        if self.others.exists() and not self.others.is_dir():
            raise UsageError(f"{FLAG} {file}: {self.others} is no folder, and more worlds are to go there: remove it")
        self.worlds = self.written = 0

    @contextlib.contextmanager
    def around(self, world: World, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """What the ranks of `world` are to run in place of `fn`, in this block, after which there is a recording."""
        self.worlds += 1
        folder = self.folder / str(self.worlds)
        command = without_option(sys.argv[1:])
        if world.rank_env is None:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main:
            if self.worlds == 1:
                self.remove_others()
            write_run(folder / str(restart_count()), command, world.backend, world.size)
        world.warm_up(RECORD)
        try:
            yield Recorded(fn, folder)
        except BaseException:
            with contextlib.suppress(PlaygroundError, OSError):  # what went wrong first is what is told
                self.write_all(folder, command, world)
            raise
        self.write_all(folder, command, world)

    def remove_others(self) -> None:
        """Remove what an earlier command has put beside the file."""
        for file in self.others.glob("*.*"):
            if file.stem.isdigit() and file.suffix in (KEPT, *PAINTED):
                file.unlink()
        with contextlib.suppress(OSError):  # there is something else in it, or it is not there
            self.others.rmdir()

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
        file = self.file
        if self.written > 1:
            self.others.mkdir(exist_ok=True)
            file = self.others / f"{self.written}{self.file.suffix}"
        if file.suffix == KEPT:
            recording = pack(folder, file)
        else:
            recording = merge(collect(folder))
            paint(recording, file)
        shown = file.relative_to(self.file.parent)
        click.echo(f"{FLAG}: {shown} shows {describe(recording)}", err=True)


def without_option(words: Sequence[str]) -> list[str]:
    """A command as it was typed, but for what concerns the recording alone."""
    places = [place for place, word in enumerate(words) if word == FLAG]
    left_out = {*places, *(place + 1 for place in places)}
    return [word for place, word in enumerate(words) if place not in left_out and not word.startswith(f"{FLAG}=")]


def describe(recording: Recording) -> str:
    """How much of a run was recorded, in one line."""
    dropped = sum(rank.dropped for rank in recording.ranks)
    cut_off = [str(rank.rank) for rank in recording.ranks if rank.is_cut_off]
    bound = max(rank.clock_bound for rank in recording.ranks)
    parts = [amount(recording)]
    if dropped:
        parts.append(f"{dropped:,} more found no room")
    if cut_off:
        parts.append(f"cut off on rank{'s' * (len(cut_off) > 1)} {', '.join(cut_off)}")
    if bound:
        parts.append(f"clocks agree within {bound * 1e6:.0f} µs")
    return ", ".join(parts)


def amount(recording: Recording) -> str:
    """How many events there are, and of how many ranks."""
    events = sum(len(rank.events) for rank in recording.ranks)
    return f"{events:,} event{'s' * (events != 1)} of {recording.size} rank{'s' * (recording.size > 1)}"
