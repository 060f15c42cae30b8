"""The memory of a flight recorder: a header, how many operations were called by channel, the latest
ones in a ring, and a text with the things that they refer to by number. It takes as much of the
machine's memory as has been written to.

It has no name: others open it as /proc/PID/fd/FD and map it, and so have it for as long as they
like, however the rank ends. Does not import torch.

Source: memfd_create(2)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from playground.runtime.flight_recorder import (
    AWAITED,
    DONE,
    ISSUED,
    Doing,
    Operation,
    RankState,
    channel_of,
)
from playground.runtime.flight_recorder.sources import NONE, Sources

NAME = "flight-recorder-of-a-rank"
MAGIC = int.from_bytes(b"PLAYBOX4", "little")
SWITCH = "PLAYGROUND_FLIGHT_RECORDER"
CAPACITY = 2048
"""Number of operations in the ring."""
LATEST = 64
"""Number of a rank's latest operations that are looked at while it runs."""
MOST_CHANNELS = 8192
"""Number of channels that are told apart."""
MOST_RAISED = 64
"""Number of classes of exceptions that are told apart."""
TEXT = 2**22
TITLE, PID, RANK, SIZE, PROGRAMS, ENDED, LAST, MAIN, USED = range(9)
"""Places in the header, in units of 8 bytes. `PROGRAMS` counts those that have begun, `ENDED` those
that have returned; `LAST` is the number of the latest operation, from 1 on, `MAIN` of that which
the main thread is in, or -1; `USED` are the bytes used of the text. As long as `LAST` and `MAIN`
stay as they are, the main thread has begun and ended no operation."""
COUNTS = 16
"""Where the counts by channel begin, in units of 8 bytes."""
RING = 8 * (COUNTS + MOST_CHANNELS)
"""Where the records begin, in bytes."""
MOST_SIZES = 6
"""Number of a shape's sizes in a record: the last one is the product of those that have no
place."""
HEADS = [struct.Struct(f"<qqqiiiii4x{sizes}q") for sizes in range(MOST_SIZES + 1)]
"""number, when called (ns), when done, index + 1, line, description, what had been raised, number
of sizes, sizes"""
RECORD = HEADS[-1]
DONE_AT = 2
"""Offset in a record, in units of 8 bytes."""
MAY_GIVE_UP = -1
"""In the place of when it was done: it is not, and has a time limit of its own."""
TEXTS = RING + RECORD.size * CAPACITY
LENGTH = TEXTS + TEXT
TIME_LIMIT = "time limit"
"""Key of the report that the time is up."""
FULL = f"what it does on more than {MOST_CHANNELS} channels"
Description = tuple[str, str, tuple[int, ...], Any, "int | None", int, int, tuple[int, ...]]
"""kind, name, group, dtype, peer, tag, number, members: see `Operation`. The dtype is torch's
own."""
Known = tuple[int, int]
"""The number of a description, and the place of its channel's count."""


def open_box(rank: int, size: int, world: str) -> Box | None:
    """This process's flight recorder. `world` is the same for all ranks of a world, and for no
    others. None if it is turned off, or the system has no such memory."""
    if os.environ.get(SWITCH) == "0":
        return None
    with contextlib.suppress(OSError):
        return Box(rank, size, world)
    return None


class Box:
    """A rank's own flight recorder, to write to."""

    def __init__(self, rank: int, size: int, world: str) -> None:
        """Raises `OSError`."""
        self.file = os.memfd_create(NAME)
        os.ftruncate(self.file, LENGTH)
        self.memory = mmap.mmap(self.file, LENGTH)
        self.octets = memoryview(self.memory)
        self.words = self.octets[:TEXTS].cast("q")
        self.words[TITLE], self.words[PID], self.words[RANK], self.words[SIZE] = (
            MAGIC,
            os.getpid(),
            rank,
            size,
        )
        self.world = world
        self.one_at_a_time = threading.RLock()
        """Held by a thread that writes what is new."""
        self.main_thread = threading.main_thread().ident

    def begin_program(self) -> None:
        """A program begins, in a process group of its own."""
        self.worlds = -1
        self.begin_world(self.words[RANK])
        self.words[PROGRAMS] += 1

    def continue_program(self) -> None:
        """The program that has returned goes on: what it calls is counted with what it has called
        before."""
        self.words[PROGRAMS] += 1

    def begin_world(self, number: int) -> None:
        """A world begins, in which this rank has another number, maybe: nothing has been called
        there."""
        words = self.words
        self.worlds += 1
        self.known: dict[Any, Known] = {}
        """By whatever whoever calls operations looks them up by."""
        self.described: dict[Description, Known] = {}
        self.channels: dict[Any, int] = {}
        self.raised: dict[type[BaseException], int] = {}
        self.unnamed: set[str] = set()
        self.lines: dict[str, int] = {}
        self.lines_written = itertools.count()
        self.sources = Sources(
            lambda line: self.number_line(f"{Path(line[0]).name}:{line[1]} in {line[2]}")
        )
        words[MAIN] = NONE
        words[USED] = 0
        self.around = NONE
        """The operation of the main thread in which it may call others."""
        self.write("world", self.world, words[LAST] + 1, self.worlds, number != words[RANK])
        for place in range(COUNTS, COUNTS + MOST_CHANNELS):
            words[place] = 0
        self.call = self.make_call()

    def end_program(self) -> None:
        """The program has returned."""
        self.words[ENDED] = self.words[PROGRAMS]

    def write(self, *thing: Any) -> int:
        """Write a line of the text. Returns its number; -1 if there is no room."""
        line = json.dumps(thing).encode() + b"\n"
        with self.one_at_a_time:
            used = self.words[USED]
            if used + len(line) > TEXT:
                return NONE
            self.octets[TEXTS + used : TEXTS + used + len(line)] = line
            self.words[USED] = used + len(line)
            return next(self.lines_written)

    def number_line(self, line: str) -> int:
        """The number of a line of the program, which is written to the text if it is new."""
        if line not in self.lines:
            self.lines[line] = self.write("line", line)
        return self.lines[line]

    def doubt(self, what: str) -> None:
        """The program has called something that is not counted: `what` it is. From now on nothing
        is proved of it."""
        with self.one_at_a_time:
            if what not in self.unnamed:
                self.unnamed.add(what)
                if self.write("unnamed", what) == NONE:
                    self.words[COUNTS + MOST_CHANNELS - 1] = 1  # see `FULL`

    def describe(self, key: Any, description: Description) -> Known:
        """From now on, operations like this are known by `key`."""
        with self.one_at_a_time:
            kind, name, group, _, peer, tag, number, _ = description
            channel = channel_of(kind, name, group, peer, tag, number)
            if len(self.known) >= 2 * MOST_CHANNELS:
                self.known.clear()
            if channel not in self.channels:
                place = COUNTS + len(self.channels)
                if (
                    len(self.channels) >= MOST_CHANNELS - 1
                    or self.write("channel", place, *channel) == NONE
                ):
                    self.words[COUNTS + MOST_CHANNELS - 1] = 1
                    return NONE, COUNTS + MOST_CHANNELS - 1  # see `FULL`
                self.channels[channel] = place
            if description not in self.described:
                self.described[description] = (
                    self.write("operation", *map(plain, description)),
                    self.channels[channel],
                )
            self.known[key] = self.described[description]
            return self.known[key]

    def make_call(self) -> Callable[..., int]:
        """The function that is called at each operation, with all that it needs at hand."""
        words = self.words
        memory = self.memory
        packs = [each.pack_into for each in HEADS]
        length = RECORD.size
        find, now, exc_info = self.sources.find, time.monotonic_ns, sys.exc_info

        def call(known: Known, depth: int, may_give_up: bool, shape: Sequence[int] = ()) -> int:
            """An operation is called, by the program's innermost line from `depth` frames above
            this one on. Returns its number."""
            description, place = known
            # no other thread comes between: nothing is called in these lines
            words[LAST] = number = words[LAST] + 1
            words[place] = index = words[place] + 1
            error = exc_info()[1]
            raised = NONE if error is None else self.note_raised(error)
            try:
                pack = packs[len(shape)]
            except IndexError:
                shape = (*shape[: MOST_SIZES - 1], prod(shape[MOST_SIZES - 1 :]))
                pack = packs[MOST_SIZES]
            pack(
                memory, RING + length * (number % CAPACITY), number, now(), -may_give_up, index,
                find(depth),
                description, raised, len(shape), *shape,
            )  # fmt: skip
            return number

        return call

    def take_back(self, number: int, known: Known) -> None:
        """The operation was refused before it began: it does not count, and meets none of the
        others'."""
        self.words[known[1]] -= 1
        self.words[RING // 8 + RECORD.size // 8 * (number % CAPACITY)] = 0

    def note_raised(self, error: BaseException) -> int:
        """The number of an exception's class, which is written to the text if it is new."""
        kind = (
            type(error)
            if type(error) in self.raised or len(self.raised) < MOST_RAISED
            else BaseException
        )
        if kind not in self.raised:
            self.raised[kind] = self.write("raised", kind.__name__)
        return self.raised[kind]

    def end(self, number: int, how: int = 0) -> None:
        """The operation is over; with `MAY_GIVE_UP`, it has a time limit of its own from now on."""
        place = RING // 8 + RECORD.size // 8 * (number % CAPACITY)
        if self.words[place] == number:  # otherwise a later one has taken its place
            self.words[place + DONE_AT] = how or time.monotonic_ns()


def plain(value: Any) -> Any:
    """As it is written: torch's types by their names, without a module's."""
    return (
        value
        if value is None or isinstance(value, int | str | tuple)
        else str(value).rpartition(".")[2]
    )


class View:
    """A rank's flight recorder as others see it."""

    def __init__(self, pid: int, file: int) -> None:
        """The box that process `pid` has opened as `file`. Raises `OSError` if it cannot be opened,
        `ValueError` if it is no box, or one of another version."""
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(opened, LENGTH, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self.pid = pid
        self.words = memoryview(self.memory)[: 8 * COUNTS].cast("q")
        if self.words[TITLE] != MAGIC:
            raise ValueError(f"the flight recorder of process {pid} is of another version")

    @property
    def progress(self) -> object:
        """Stays the same as long as the main thread sleeps, or is stopped, in one operation, or is
        in none, and the program has not returned."""
        status = process_status(self.pid, "task", str(self.pid)) if self.waits else []
        used = status[11:13]  # ticks of the processor, as user and system
        return self.words[LAST], self.words[MAIN], self.words[ENDED], used, status[:1] == [b"T"]

    @property
    def programs(self) -> int:
        """The number of programs that have begun."""
        return self.words[PROGRAMS]

    @property
    def waits(self) -> bool:
        """Whether the main thread is in an operation."""
        return self.words[MAIN] != NONE

    @property
    def has_ended(self) -> bool:
        return self.words[ENDED] == self.words[PROGRAMS]

    def read(self, latest: int = CAPACITY) -> RankState:
        """The rank's state and its latest operations, without one that is half written."""
        content, lines = self.memory[:TEXTS], self.read_lines()
        words = memoryview(content)[:RING].cast("q")
        first, worlds, moved = lines[0][2:] if lines else [words[LAST] + 1, 0, False]
        main, now = words[MAIN], time.monotonic()
        numbers = [*range(max(first, words[LAST] - latest + 1), words[LAST] + 1)]
        numbers = numbers if main in numbers or main < first else [main, *numbers]
        operations = {
            number: read
            for number in numbers
            if (read := read_operation(content, number, main, lines))
        }
        counts = {
            (a, tuple(b), c, d, e): words[place] for _, place, a, b, c, d, e in of(lines, "channel")
        }
        inside = operations.get(main)
        unnamed = next((what for _, what in of(lines, "unnamed")), "")
        latest_times = [max(operation.issued, operation.done) for operation in operations.values()]
        return RankState(
            rank=words[RANK],
            doing=Doing.FINISHED
            if self.has_ended
            else Doing.IN_OPERATION
            if inside
            else Doing.IN_PROGRAM,
            operations=tuple(operations.values()),
            waits_for=inside,
            counts=counts,
            since=now - (inside.issued if inside else max(latest_times, default=now)),
            unnamed=FULL if words[COUNTS + MOST_CHANNELS - 1] else unnamed,
            worlds=worlds,
            is_renumbered=bool(moved),
        )

    def read_lines(self) -> list[list[Any]]:
        """The lines of the text, up to the first that is not whole."""
        lines = []
        for line in self.memory[TEXTS : TEXTS + min(max(self.words[USED], 0), TEXT)].splitlines():
            try:
                lines.append(clean(json.loads(line)))
            except ValueError:
                break
        return lines

    def read_since(self, progress: object, latest: int = CAPACITY) -> RankState:
        """The rank's state: if it is in an operation, but has gone on since its progress was this,
        it is in the program, and about to do something else."""
        state = self.read(latest)
        if is_stopped(self.pid):
            return replace(state, doing=Doing.STOPPED)
        moves = state.doing == Doing.IN_OPERATION and self.progress != progress
        return replace(state, doing=Doing.IN_PROGRAM) if moves else state

    @property
    def world(self) -> tuple[str, int] | None:
        """The name of its world, and how many ranks that has; None before the first program."""
        lines = self.read_lines()
        return (lines[0][1], self.words[SIZE]) if lines else None


def clean(value: Any) -> Any:
    """Without characters that a terminal obeys: a box may be another user's."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() else "?" for each in value)
    return [clean(each) for each in value] if isinstance(value, list) else value


def of(lines: list[list[Any]], about: str) -> list[list[Any]]:
    return [line for line in lines if line[0] == about]


def read_operation(
    content: bytes, number: int, main: int, lines: list[list[Any]]
) -> Operation | None:
    """The operation with this number; None if it is not whole."""
    record = RECORD.unpack_from(content, RING + RECORD.size * (number % CAPACITY))
    written, called, done, index, line, description, raised, sizes, *shape = record
    if (
        written != number
        or not 0 <= description < len(lines)
        or lines[description][0] != "operation"
    ):
        return None
    _, kind, name, group, dtype, peer, tag, group_number, members = lines[description]
    return Operation(
        kind=kind, name=name, group=tuple(group), shape=tuple(shape[: max(sizes, 0)]), dtype=dtype,
        peer=peer, tag=tag,
        number=group_number, members=tuple(members), index=index - 1,
        line=lines[line][1] if 0 <= line < len(lines) else "",
        raised=lines[raised][1] if 0 <= raised < len(lines) else "",
        state=DONE if done > 0 else AWAITED if number == main else ISSUED,
        issued=called / 1e9, done=max(done, 0) / 1e9, may_give_up=done == MAY_GIVE_UP,
    )  # fmt: skip


def process_status(pid: int, *thread: str) -> list[bytes]:
    """The state of a process or of one of its threads, and what follows; empty if it is gone.

    Source: proc_pid_stat(5)
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}", *thread, "stat").read_bytes().rpartition(b")")[2].split()
    return []


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped this process (SIGSTOP)."""
    return process_status(pid)[:1] == [b"T"]


def find_boxes(pids: Iterable[int]) -> Iterator[View]:
    """The flight recorders of these processes, of those that may be looked at. (A launcher has its
    ranks' open.)"""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            files = (
                file for file in os.listdir(f"/proc/{pid}/fd") if is_box(f"/proc/{pid}/fd/{file}")
            )
            views = (View(pid, int(file)) for file in files)
            if own := next((view for view in views if view.words[PID] == pid), None):
                yield own


def is_box(path: str) -> bool:
    with contextlib.suppress(OSError):  # it has been closed since
        return os.readlink(path).startswith(f"/memfd:{NAME}")
    return False
