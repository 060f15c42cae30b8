"""A recording as a file, in the format of its ending. `--see FILE` records the ranks of a command,
and writes the file when they are done.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import click

from playground.base.errors import RankFailed, RankTimeout, UsageError
from playground.base.files import belongs_to_another
from playground.base.untrusted import printable
from playground.explain.replay.analyse import match_messages, to_logical_time
from playground.explain.replay.play import render_page
from playground.explain.replay.record import (
    COMPUTE,
    GRADIENT,
    MAIN,
    MOVE,
    PHASE,
    VALUES,
    WAIT,
    Event,
    Recording,
)
from playground.explain.replay.record.layout import LOG_FILE, LOGS, RUN, write_zip
from playground.explain.replay.record.run import (
    RECORDED,
    Recorded,
    collect,
    describe_run,
    merge,
    note_failure,
)
from playground.explain.replay.render.renderers import check_ending, render_scene, to_svg, write
from playground.explain.replay.render.text_report import to_words
from playground.explain.replay.render.timeline import lay_out
from playground.ui.options import check_writable
from playground.ui.units import plural
from playground.world.command_world import CommandWorld

RENDERERS: dict[str, Callable[[Recording], str]] = {
    ".html": render_page,
    ".svg": lambda recording: to_svg(lay_out(recording)),
    ".txt": to_words,
    ".json": lambda recording: to_chrome(recording),
}
RENDERED = tuple(RENDERERS)
"""Endings of the formats in which a recording can be rendered."""
FLAG = "--see"
IN_FOLDER = re.compile(rf"\d+(/({re.escape(RUN)}|{LOG_FILE.pattern}))?")
"""A path in the folder that ranks write to."""
KEPT = ".playground"
"""The ending of a recording to be read again."""


def render(recording: Recording, file: Path) -> None:
    """Render a recording in the format of the file's ending. Raises `UsageError` if it cannot be
    written."""
    write(RENDERERS[file.suffix](recording), file)


def render_steps(recording: Recording, file: Path) -> None:
    """Render a recording with logical steps in place of seconds. Raises `UsageError` if it cannot
    be written."""
    render_scene(lay_out(to_logical_time(recording), unit="step"), file)


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
                    note_failure(file.parent, failure, run)
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


def amount(recording: Recording) -> str:
    """The numbers of events and of ranks."""
    return (
        f"{plural(sum(len(rank.events) for rank in recording.ranks), 'event')} of "
        f"{plural(recording.size, 'rank')}"
    )


SENT = 1e-6
"""Seconds that a slice `sent` is long, at most: an arrow begins in it."""
NESTED = (PHASE, COMPUTE, WAIT, MOVE)
"""Kinds whose events in a main thread lie in each other or beside each other."""
Entry = dict[str, object]
"""One event of the format. `ts` and `dur` are in microseconds."""


def to_chrome(recording: Recording) -> str:
    """The recording as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and other readers of
    such traces.

    Source: the Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    about = {"command": " ".join(recording.command), "backend": recording.backend}
    about |= {**recording.versions, "dropped": str(sum(rank.dropped for rank in recording.ranks))}
    found = [*event_entries(recording), *message_entries(recording)]
    document = {"traceEvents": found, "displayTimeUnit": "ns", "otherData": about}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def event_entries(recording: Recording) -> Iterator[Entry]:
    """The entries of events. A process is a rank, and its thread 0 the main one. Slices of a thread
    must lie in each other or beside each other: what may overlap is asynchronous, which has rows of
    its own."""
    numbers, last = itertools.count(), recording.end
    for rank in recording.ranks:
        where = {"pid": rank.rank, "tid": 0}
        name = f"rank {rank.rank} ({rank.device})"
        yield {"name": "process_name", "ph": "M", **where, "args": {"name": name}}
        yield {"name": "thread_name", "ph": "M", **where, "args": {"name": MAIN}}
        for event in rank.events:
            start = microseconds(event.start)
            end = microseconds(event.end if isfinite(event.end) else max(last, event.start))
            about = {"name": event.name, "cat": event.kind, **where}
            entry = {**about, "ts": start, "args": arguments(recording, event)}
            if event.kind in (GRADIENT, VALUES):
                yield entry | {"ph": "i", "s": "t"}
            elif event.kind in NESTED and event.lane == MAIN:
                yield entry | {"ph": "X", "dur": round(end - start, 3)}
            else:
                yield entry | {"ph": "b", "id": (number := next(numbers))}
                yield about | {"ph": "e", "id": number, "ts": end}


def message_entries(recording: Recording) -> Iterator[Entry]:
    """The arrows of messages. An arrow leads from a short slice `sent` to one without length,
    `arrived`, in a thread of their own, because arrows connect slices."""
    for rank in recording.ranks:
        where = {"pid": rank.rank, "tid": 1}
        yield {"name": "thread_name", "ph": "M", **where, "args": {"name": "messages"}}
    for number, (send, receive) in enumerate(match_messages(recording)[0]):
        if isfinite(receive.end):
            what = {"cat": "message", "id": number}
            sent = {**what, "pid": send.rank, "tid": 1, "ts": microseconds(send.start)}
            arrived = {**what, "pid": receive.rank, "tid": 1, "ts": microseconds(receive.end)}
            yield {"name": "sent", "ph": "X", **sent, "dur": microseconds(min(send.seconds, SENT))}
            yield {"name": "message", "ph": "s", **sent}
            yield {"name": "arrived", "ph": "X", **arrived, "dur": 0.0}
            yield {"name": "message", "ph": "f", "bp": "e", **arrived}


def arguments(recording: Recording, event: Event) -> dict[str, object]:
    """The fields of an event besides its time."""
    names = ("number", "peer", "nbytes", "message", "tag", "offset", "group", "shape", "awaits")
    found = {name: value for name in names if (value := getattr(event, name)) not in (None, ())}
    if event.is_with_stranger:
        found["peer"] = event.number_of_peer
    if event.source is not None:
        source = recording.sources[event.source]
        found["source"] = f"{source.file}:{source.line} in {source.function}"
    return found if isfinite(event.end) else found | {"cut off": True}


def microseconds(seconds: float) -> float:
    """Microseconds, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)
