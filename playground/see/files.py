"""A recording as a file: its ending says what is painted. `--see FILE` has what the ranks of a command do recorded, and
painted when they are done.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from playground.console.paths import check_writable
from playground.runtime.entry import World
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.untrusted import printable
from playground.see.analyse.messages import to_logical_time
from playground.see.paint.chrome import to_chrome
from playground.see.paint.painters import SCENE_PAINTERS, check_ending, paint_scene, to_text, write
from playground.see.paint.timeline import lay_out
from playground.see.paint.words import to_words
from playground.see.play.page import render_page
from playground.see.record.layout import FILES, RUN, TABLES
from playground.see.record.merge import merge
from playground.see.record.recording import Recording
from playground.see.record.run import RECORD, Recorded, collect, describe_run, pack

PAGE, TRACE = ".html", ".json"
PAINTED = (PAGE, *SCENE_PAINTERS, TRACE)
"""Endings that a recording can be painted as."""
FLAG = "--see"
KEPT = ".playground"
"""The ending of a recording itself."""
IN_FOLDER = re.compile(rf"\d+(/\d+(/({re.escape(RUN)}|rank-\d+\.({'|'.join(FILES)})))?)?")
"""What ranks leave in their folder: world, restart, file."""


def paint(recording: Recording, file: Path) -> None:
    """Paint all of a recording, as the ending of the file says. Raises `UsageError` as `paint_scene` does."""
    check_ending(file, PAINTED)
    if file.suffix == PAGE:
        write_page(recording, file)
    elif file.suffix == TRACE:
        write(to_chrome(recording), file)
    elif file.suffix == ".txt":
        write(f"{to_text(lay_out(recording))}\n{to_words(recording)}", file)
    else:
        paint_scene(lay_out(recording), file)


def paint_steps(recording: Recording, file: Path) -> None:
    """Paint all of a recording with logical steps in place of seconds. Raises `UsageError` as `paint_scene` does."""
    paint_scene(lay_out(to_logical_time(recording), unit="step"), file)


def write_page(recording: Recording, file: Path, *, other: Recording | None = None) -> None:
    """Write the page that plays this recording, or two of them on one clock. Raises `UsageError` as `paint_scene`."""
    write(render_page(recording) if other is None else render_page(recording, other), file)


class Recordings:
    """One for each world of a command: the first goes to the file that was asked for, the others into a folder beside
    it, numbered from 2 on; those of an earlier command are removed from there.

    Raises `UsageError` for an ending that says nothing, a file that cannot be written, or a folder in the place of the
    ranks' that holds anything else.
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
        if strange := find_strange(self.folder):
            raise UsageError(f"{FLAG} {file}: {strange} is in the way of what ranks record: move it, or name another")
        self.worlds = self.written = 0
        self.failure: PlaygroundError | None = None
        """Why a recording was not written."""

    @contextlib.contextmanager
    def __call__(self, world: World, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """What the ranks of `world` are to run in place of `fn`, in this block, after which there is a recording."""
        self.worlds += 1
        folder = self.folder / str(self.worlds)
        run = describe_run(without_option(sys.argv[1:]), world.backend, world.size) if world.is_main else ""
        if world.rank_env is None:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main and self.worlds == 1:
            self.remove_others()
        world.warm_up(RECORD)
        try:
            yield Recorded(fn, folder, run)
        except BaseException as error:
            if world.is_main:
                with contextlib.suppress(PlaygroundError):  # what went wrong first is what is told
                    if not self.write_all(folder, run) and not isinstance(error, UsageError):
                        click.echo(f"{FLAG}: no rank had begun to record, so there is nothing to be seen", err=True)
            raise
        if world.is_main:
            self.write_or_tell_later(folder, run)

    def write_or_tell_later(self, folder: Path, run: str) -> None:
        """As `write_all`, but a command that fails to do it first shows the results of what it has run."""
        try:
            self.write_all(folder, run)
        except PlaygroundError as error:
            context = click.get_current_context(silent=True)
            if context is None:
                raise
            self.failure = self.failure or error
            context.call_on_close(self.check)

    def check(self) -> None:
        """Raise `PlaygroundError` if a recording was not written, unless there is another error to be told."""
        if self.failure and sys.exc_info()[0] is None:
            raise self.failure

    def remove_others(self) -> None:
        """Remove what an earlier command has put beside the file."""
        for file in self.others.glob("*.*"):
            if file.stem.isdigit() and file.suffix in (KEPT, *PAINTED):
                file.unlink()
        with contextlib.suppress(OSError):  # there is something else in it, or it is not there
            self.others.rmdir()

    def write_all(self, folder: Path, run: str) -> int:
        """Make files of what one world has recorded, and of each before it whose place it took: as many as are
        returned. Rank 0, or whoever has started the ranks, does it.

        Raises `PlaygroundError` where that fails; then what the ranks have written is left.
        """
        attempts = sorted({file.parent for file in folder.glob(f"*/*.{TABLES}")}, key=lambda each: int(each.name))
        for attempt in attempts:
            try:
                if not (attempt / RUN).exists():  # rank 0 had not come to it
                    (attempt / RUN).write_text(run)
                line = self.write(attempt)
            except (OSError, UsageError) as error:
                kind, why = (PlaygroundError, error.strerror) if isinstance(error, OSError) else (UsageError, error)
                shown = f"`playground see {attempt}` shows what the ranks have written"
                raise kind(f"{FLAG} {self.file.name}: no recording could be written ({why}): {shown}") from None
            click.echo(line, err=True)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is something else in it
            self.folder.rmdir()
        return len(attempts)

    def write(self, folder: Path) -> str:
        """Make a file of this recording; returns what is to be said of it."""
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
        return f"{FLAG}: {printable(str(file.relative_to(self.file.parent)))} shows {describe(recording)}"


def find_strange(folder: Path) -> Path | None:
    """The first thing in a folder that no recording rank has left there; the folder itself if it is none."""
    if not folder.is_dir():
        return folder if folder.exists() else None
    return next((file for file in folder.rglob("*") if not IN_FOLDER.fullmatch(str(file.relative_to(folder)))), None)


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
