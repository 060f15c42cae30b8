"""A recording as a file, in the format of its ending. `--see FILE` records the ranks of a command, and writes the file
when they are done.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import click

from playground.console.options import check_writable
from playground.runtime.errors import UsageError
from playground.runtime.launcher.entry import CommandWorld
from playground.runtime.untrusted import printable
from playground.see.analyse import match_messages, to_logical_time
from playground.see.paint.painters import check_ending, paint_scene, to_svg, write
from playground.see.paint.timeline import lay_out
from playground.see.paint.words import plural, to_words
from playground.see.play import render_page
from playground.see.record import COMPUTE, GRADIENT, MAIN, MOVE, PHASE, VALUES, WAIT, Event, Recording
from playground.see.record.layout import RUN, TABLES, write_zip
from playground.see.record.run import RECORDED, Recorded, collect, describe_run, merge

PAINTERS: dict[str, Callable[[Recording], str]] = {
    ".html": render_page,
    ".svg": lambda recording: to_svg(lay_out(recording)),
    ".txt": to_words,
    ".json": lambda recording: to_chrome(recording),
}
PAINTED = tuple(PAINTERS)
"""Endings of the formats in which a recording can be painted."""
FLAG = "--see"
KEPT = ".playground"
"""The ending of a recording to be read again."""


def paint(recording: Recording, file: Path) -> None:
    """Paint a recording in the format of the file's ending. Raises `UsageError` if it cannot be written."""
    write(PAINTERS[file.suffix](recording), file)


def paint_steps(recording: Recording, file: Path) -> None:
    """Paint a recording with logical steps in place of seconds. Raises `UsageError` if it cannot be written."""
    paint_scene(lay_out(to_logical_time(recording), unit="step"), file)


class Recordings:
    """The recordings of a command's worlds: the first goes to the file that was asked for, the others into a folder
    beside it, numbered from 2 on; those of an earlier command are removed from there.

    Raises `UsageError` for an unknown ending or a file that cannot be written. Where that fails after the run, a line
    says so, and where the ranks' folder is left: `see` reads it, too.
    """

    def __init__(self, file: Path) -> None:
        check_ending(file, (KEPT, *PAINTED), FLAG)
        check_writable(FLAG, file)
        self.file = file.absolute()
        self.folder = self.file.with_name(f"{file.name}.ranks")
        """The folder that ranks write to."""
        self.others = self.file.with_name(f"{file.name}.worlds")
        self.worlds = self.written = 0

    @contextlib.contextmanager
    def __call__(self, world: CommandWorld, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """The function that the ranks of `world` run in place of `fn` here. Afterwards the recording is written."""
        if world.local_size < world.size:
            where = f"{world.size} ranks, of which this host has {world.local_size}"
            raise UsageError(f"{FLAG} on {where}: other hosts have clocks of their own, record a run on one host")
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
        finally:
            if world.is_main:
                self.write_all(folder, run)

    def remove_others(self) -> None:
        """Remove the recordings of an earlier command beside the file."""
        for file in self.others.glob("*.*"):
            if file.stem.isdigit() and file.suffix in (KEPT, *PAINTED):
                file.unlink()
        with contextlib.suppress(OSError):  # there is something else in it, or it is not there
            self.others.rmdir()

    def write_all(self, folder: Path, run: str) -> None:
        """Write a file for each attempt of one world, the failed ones and the last. Called by rank 0, or by the process
        that started the ranks."""
        for attempt in sorted({file.parent for file in folder.glob(f"*/*.{TABLES}")}, key=lambda each: int(each.name)):
            try:
                if not (attempt / RUN).exists():  # rank 0 had not written it
                    (attempt / RUN).write_text(run)
                click.echo(self.write(attempt), err=True)
            except (OSError, UsageError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                shown = f"`playground see {attempt}` shows what the ranks have written"
                click.echo(f"{FLAG} {self.file.name}: no recording could be written ({why}): {shown}", err=True)
                return
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is something else in it
            self.folder.rmdir()

    def write(self, folder: Path) -> str:
        """Write the file of this recording. Returns a line about it."""
        self.written, file = self.written + 1, self.file
        if self.written > 1:
            self.others.mkdir(exist_ok=True)
            file = self.others / f"{self.written}{self.file.suffix}"
        files = collect(folder)
        recording = merge(files, folder)
        if file.suffix == KEPT:
            write_zip(file, files)
        else:
            paint(recording, file)
        return f"{FLAG}: {printable(str(file.relative_to(self.file.parent)))} shows {describe(recording)}"


def without_option(words: Sequence[str]) -> list[str]:
    """A command as it was typed, without its option `--see`."""
    places = [place for place, word in enumerate(words) if word == FLAG]
    left_out = {*places, *(place + 1 for place in places)}
    return [word for place, word in enumerate(words) if place not in left_out and not word.startswith(f"{FLAG}=")]


def describe(recording: Recording) -> str:
    """A line on how much of a run was recorded."""
    parts = [amount(recording)]
    if dropped := sum(rank.dropped for rank in recording.ranks):
        parts.append(f"{dropped:,} more found no room")
    if cut_off := [str(rank.rank) for rank in recording.ranks if rank.is_cut_off]:
        parts.append(f"cut off on rank{'s' * (len(cut_off) > 1)} {', '.join(cut_off)}")
    return ", ".join(parts)


def amount(recording: Recording) -> str:
    """The numbers of events and of ranks."""
    return f"{plural(sum(len(rank.events) for rank in recording.ranks), 'event')} of {plural(recording.size, 'rank')}"


SENT = 1e-6
"""Seconds that a slice `sent` is long, at most: an arrow begins in it."""
NESTED = (PHASE, COMPUTE, WAIT, MOVE)
"""Kinds whose events in a main thread lie in each other or beside each other."""
Entry = dict[str, Any]
"""One event of the format. `ts` and `dur` are in microseconds."""


def to_chrome(recording: Recording) -> str:
    """The recording as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and other readers of such traces.

    Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    about = {"command": " ".join(recording.command), "backend": recording.backend, **recording.versions}
    about["dropped"] = str(sum(rank.dropped for rank in recording.ranks))
    found = [*event_entries(recording), *message_entries(recording)]
    document = {"traceEvents": found, "displayTimeUnit": "ns", "otherData": about}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def event_entries(recording: Recording) -> Iterator[Entry]:
    """The entries of events. A process is a rank, and its thread 0 the main one. Slices of a thread must lie in each
    other or beside each other: what may overlap is asynchronous, which has rows of its own."""
    numbers = itertools.count()
    for rank in recording.ranks:
        where = {"pid": rank.rank, "tid": 0}
        yield {"name": "process_name", "ph": "M", **where, "args": {"name": f"rank {rank.rank} ({rank.device})"}}
        yield {"name": "thread_name", "ph": "M", **where, "args": {"name": MAIN}}
        for event in rank.events:
            start = microseconds(event.start)
            end = microseconds(event.end if isfinite(event.end) else max(recording.end, event.start))
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
    """The arrows of messages. An arrow leads from a short slice `sent` to one without length, `arrived`, in a thread of
    their own, because arrows connect slices."""
    for rank in recording.ranks:
        yield {"name": "thread_name", "ph": "M", "pid": rank.rank, "tid": 1, "args": {"name": "messages"}}
    for number, (send, receive) in enumerate(match_messages(recording)[0]):
        if isfinite(receive.end):
            for name, event, at, long, arrow in (
                ("sent", send, send.start, min(send.seconds, SENT), {"ph": "s"}),
                ("arrived", receive, receive.end, 0.0, {"ph": "f", "bp": "e"}),
            ):
                where = {"cat": "message", "pid": event.rank, "tid": 1, "ts": microseconds(at), "id": number}
                yield {"name": name, "ph": "X", **where, "dur": microseconds(long)}
                yield {"name": "message", **where, **arrow}


def arguments(recording: Recording, event: Event) -> dict[str, object]:
    """The fields of an event besides its time."""
    names = ("number", "peer", "nbytes", "message", "tag", "offset", "group", "shape", "awaits")
    found = {name: value for name in names if (value := getattr(event, name)) not in (None, ())}
    if event.source is not None:
        source = recording.sources[event.source]
        found["source"] = f"{source.file}:{source.line} in {source.function}"
    return found if isfinite(event.end) else found | {"cut off": True}


def microseconds(seconds: float) -> float:
    """Microseconds, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)
