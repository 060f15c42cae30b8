"""`--see FILE`: records the ranks of a command, and writes the file when they are done."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from playground.base.errors import RankFailed, RankTimeout, UsageError
from playground.base.files import belongs_to_another
from playground.base.untrusted import printable
from playground.explain.replay.files import RENDERED, amount, check_ending, render
from playground.explain.replay.record.layout import LOG_FILE, LOGS, RUN, write_zip
from playground.explain.replay.record.reading import merge
from playground.explain.replay.record.run import (
    RECORDED,
    Recorded,
    collect,
    describe_run,
    note_failure,
)
from playground.ui.paths import check_writable
from playground.world.command_world import CommandWorld
from playground.world.launcher.examiner import line_of

FLAG = "--see"
IN_FOLDER = re.compile(rf"\d+(/({re.escape(RUN)}|{LOG_FILE.pattern}))?")
"""A path in the folder that ranks write to."""
KEPT = ".playground"
"""The ending of a recording to be read again."""


class Recordings:
    """Records a command's first world, up to its first failure, into the file that was asked for.

    Raises `UsageError` for an unknown ending, a file that cannot be written, or where the folder of
    ranks would be and there is anything but what ranks record. Where writing fails after the run, a
    line says so, and where the ranks' folder is left: `see` reads it, too.
    """

    def __init__(self, file: Path) -> None:
        check_ending(file, (KEPT, *RENDERED), FLAG)
        check_writable(FLAG, file)
        self.file = file.absolute()
        self.folder = self.file.with_name(f"{file.name}.ranks")
        """The folder that ranks write to. No other user can write to it, or to what is in it."""
        try:
            strange = find_strange(self.folder)
        except OSError as error:
            raise UsageError(
                f"{FLAG} {file}: ranks cannot write to {self.folder}: {error.strerror}"
            ) from None
        if strange is not None:
            raise UsageError(
                f"{FLAG} {file}: {strange} is in the way of what ranks record: move it, or name "
                "another"
            )
        self.has_begun = False

    @contextlib.contextmanager
    def __call__(self, world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """The function that the ranks of `world` run in place of `fn` here. Afterwards the
        recording is written."""
        if world.local_size < world.size:
            where = f"{world.size} ranks, of which this host has {world.local_size}"
            raise UsageError(
                f"{FLAG} on {where}: other hosts have clocks of their own, record a run on one host"
            )
        if self.has_begun:
            yield fn
            return
        self.has_begun = True
        run = describe_run(without_option(sys.argv[1:]), world.backend, world.size)
        self.make_folder(is_shared=world.rank_env is not None)
        world.warm_up(RECORDED)
        try:
            yield Recorded(fn, self.folder, run)
        except (RankFailed, RankTimeout) as failure:
            for file in sorted(self.folder.glob(f"*/{RUN}"))[:1]:
                with contextlib.suppress(OSError):  # the failure is what is told
                    traceback = getattr(failure, "traceback", "")
                    note_failure(file.parent, failure, run, line_of(traceback))
            raise
        finally:
            if world.is_main:
                self.write(run)

    def make_folder(self, *, is_shared: bool) -> None:
        """Make the folder of the ranks in the place of an earlier run's; `is_shared`: unless
        another rank has made it. Raises `UsageError` if it is another user's, whose links would
        lead to files of ours."""
        if not is_shared:
            shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(mode=0o700, exist_ok=is_shared)
            if is_shared and belongs_to_another(self.folder, own=os.geteuid()):
                raise PermissionError(errno.EACCES, "it belongs to another user")
        except OSError as error:
            raise UsageError(
                f"{FLAG}: ranks cannot write to {self.folder}: {error.strerror}"
            ) from None

    def write(self, run: str) -> None:
        """Write the file. Called by rank 0, or by the process that started the ranks."""
        for log in sorted(self.folder.glob(f"*/{LOGS}"))[:1]:
            folder = log.parent
            try:
                if not (folder / RUN).exists():  # rank 0 had not written it
                    (folder / RUN).write_text(run)
                files = collect(folder)
                recording = merge(files, folder)
                if self.file.suffix == KEPT:
                    write_zip(self.file, files)
                else:
                    render(recording, self.file)
            except (OSError, UsageError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                shown = f"`playground see {folder}` shows what the ranks have written"
                click.echo(
                    f"{FLAG} {self.file.name}: no recording could be written ({why}): {shown}",
                    err=True,
                )
                return
            click.echo(f"{FLAG}: {printable(self.file.name)} shows {amount(recording)}", err=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def find_strange(folder: Path) -> Path | None:
    """The first thing in a folder that no rank has left there when it recorded; the folder itself
    if it is none. Raises `OSError`."""
    if folder.is_symlink() or not folder.is_dir():
        return folder if os.path.lexists(folder) else None
    return next(
        (
            each
            for each in folder.rglob("*")
            if not IN_FOLDER.fullmatch(str(each.relative_to(folder)))
        ),
        None,
    )


def without_option(words: Sequence[str]) -> list[str]:
    """A command as it was typed, without its option `--see`."""
    places = [place for place, word in enumerate(words) if word == FLAG]
    left_out = {*places, *(place + 1 for place in places)}
    return [
        word
        for place, word in enumerate(words)
        if place not in left_out and not word.startswith(f"{FLAG}=")
    ]
