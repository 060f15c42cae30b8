"""A recording as a file, in the format of its ending. `--see FILE` records the ranks of a command, and writes the file
when they are done.
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
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.launcher.entry import World
from playground.runtime.untrusted import printable
from playground.see.analyse import to_logical_time
from playground.see.paint.chrome import to_chrome
from playground.see.paint.painters import SCENE_PAINTERS, check_ending, paint_scene, to_text, write
from playground.see.paint.timeline import lay_out
from playground.see.paint.words import plural, to_words
from playground.see.play import render_page
from playground.see.record import Recording
from playground.see.record.layout import FILES, RUN, TABLES
from playground.see.record.run import RECORDED, Recorded, collect, describe_run, merge, pack

PAGE, TRACE = ".html", ".json"
PAINTED = (PAGE, *SCENE_PAINTERS, TRACE)
"""Endings of the formats in which a recording can be painted."""
FLAG = "--see"
KEPT = ".playground"
"""The ending of a recording to be read again."""
IN_FOLDER = re.compile(rf"\d+(/\d+(/({re.escape(RUN)}|rank-\d+\.({'|'.join(FILES)})))?)?")
"""Paths in the ranks' folder: world, restart, file."""


def paint(recording: Recording, file: Path) -> None:
    """Paint a recording in the format of the file's ending. Raises `UsageError` as `paint_scene` does."""
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
    """Paint a recording with logical steps in place of seconds. Raises `UsageError` as `paint_scene` does."""
    paint_scene(lay_out(to_logical_time(recording), unit="step"), file)


def write_page(recording: Recording, file: Path, *, other: Recording | None = None) -> None:
    """Write the page that plays this recording, or two of them on one clock. Raises `UsageError` as `paint_scene`."""
    write(render_page(recording) if other is None else render_page(recording, other), file)


class Recordings:
    """The recordings of a command's worlds: the first goes to the file that was asked for, the others into a folder
    beside it, numbered from 2 on; those of an earlier command are removed from there.

    Raises `UsageError` for an unknown ending, a file that cannot be written, or a folder in the place of the ranks'
    that holds anything else.
    """

    def __init__(self, file: Path) -> None:
        check_ending(file, (KEPT, *PAINTED), FLAG)
        check_writable(FLAG, file)
        self.file = file.absolute()
        self.folder = self.file.with_name(f"{file.name}.ranks")
        """The folder that ranks write to. It is left only if no file could be made of it: `see` reads it, too."""
        self.others = self.file.with_name(f"{file.name}.worlds")
        if self.others.exists() and not self.others.is_dir():
            raise UsageError(f"{FLAG} {file}: {self.others} is no folder, and more worlds are to go there: remove it")
        if strange := find_strange(self.folder):
            raise UsageError(f"{FLAG} {file}: {strange} is in the way of what ranks record: move it, or name another")
        self.worlds = self.written = 0
        self.failure: PlaygroundError | None = None
        """The error that kept a recording from being written."""

    @contextlib.contextmanager
    def __call__(self, world: World, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """The function that the ranks of `world` run in place of `fn` here. Afterwards the recording is written."""
        self.worlds += 1
        folder = self.folder / str(self.worlds)
        run = describe_run(without_option(sys.argv[1:]), world.backend, world.size) if world.is_main else ""
        if world.rank_env is None:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main and self.worlds == 1:
            self.remove_others()
        world.warm_up(RECORDED)
        try:
            yield Recorded(fn, folder, run)
        except BaseException as error:
            if world.is_main:
                with contextlib.suppress(PlaygroundError):  # the first error is the one reported
                    if not self.write_all(folder, run) and not isinstance(error, UsageError):
                        click.echo(f"{FLAG}: no rank had begun to record, so there is nothing to be seen", err=True)
            raise
        if world.is_main:
            try:
                self.write_all(folder, run)
            except PlaygroundError as error:
                context = click.get_current_context(silent=True)
                if context is None:
                    raise
                self.failure = self.failure or error  # raised after the command has shown its results
                context.call_on_close(self.check)

    def check(self) -> None:
        """Raise `PlaygroundError` if a recording was not written, unless another error is being raised."""
        if self.failure and sys.exc_info()[0] is None:
            raise self.failure

    def remove_others(self) -> None:
        """Remove the recordings of an earlier command beside the file."""
        for file in self.others.glob("*.*"):
            if file.stem.isdigit() and file.suffix in (KEPT, *PAINTED):
                file.unlink()
        with contextlib.suppress(OSError):  # there is something else in it, or it is not there
            self.others.rmdir()

    def write_all(self, folder: Path, run: str) -> int:
        """Write a file for each attempt of one world, the failed ones and the last. Returns their number. Called by
        rank 0, or by the process that started the ranks.

        Raises `PlaygroundError` where that fails; then the ranks' folder is left.
        """
        attempts = sorted({file.parent for file in folder.glob(f"*/*.{TABLES}")}, key=lambda each: int(each.name))
        for attempt in attempts:
            try:
                if not (attempt / RUN).exists():  # rank 0 had not written it
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
        """Write the file of this recording. Returns a line about it."""
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
    """The first file in a folder that no recording rank has left there; the folder itself if it is a file."""
    if not folder.is_dir():
        return folder if folder.exists() else None
    return next((file for file in folder.rglob("*") if not IN_FOLDER.fullmatch(str(file.relative_to(folder)))), None)


def without_option(words: Sequence[str]) -> list[str]:
    """A command as it was typed, without its option `--see`."""
    places = [place for place, word in enumerate(words) if word == FLAG]
    left_out = {*places, *(place + 1 for place in places)}
    return [word for place, word in enumerate(words) if place not in left_out and not word.startswith(f"{FLAG}=")]


def describe(recording: Recording) -> str:
    """A line on how much of a run was recorded."""
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
    """The numbers of events and of ranks."""
    return f"{plural(sum(len(rank.events) for rank in recording.ranks), 'event')} of {plural(recording.size, 'rank')}"
