"""The memory of a black box: a header, how many operations were called by channel, the latest ones in a ring, and a
text with the things that they refer to by number.

It has no name: others open it as /proc/PID/fd/FD and map it, and so have it for as long as they like, however the rank
ends. Does not import torch.

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
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from playground.runtime.black_box import (
    AWAITED,
    DONE,
    FINISHED,
    IN_OPERATION,
    IN_PROGRAM,
    ISSUED,
    STOPPED,
    Operation,
    RankState,
    channel_of,
)
from playground.runtime.black_box.sources import NONE, Sources

NAME = "black-box-of-a-rank"
MAGIC = int.from_bytes(b"PLAYBOX1", "little")
SWITCH = "PLAYGROUND_BLACK_BOX"
"""Environment variable that turns black boxes off, with the value 0."""
CAPACITY = 2048
"""Number of operations in the ring."""
LATEST = 64
"""Number of a rank's latest operations that are looked at while it runs."""
MOST_CHANNELS = 1024
TEXT = 2**17
"""Bytes of the text."""
TITLE, PID, RANK, SIZE, PROGRAMS, ENDED, NEXT, MAIN, USED = range(9)
"""Places in the header, in units of 8 bytes. `PROGRAMS` counts those that have begun, `ENDED` those that have returned;
`NEXT` is the number of the next operation, `MAIN` of that which the main thread is in, or -1; `USED` are the bytes used
of the text. As long as `NEXT` and `MAIN` stay as they are, the main thread has begun and ended no operation."""
COUNTS = 16
"""Where the counts by channel begin, in units of 8 bytes."""
RING = 8 * (COUNTS + MOST_CHANNELS)
"""Where the records begin, in bytes."""
RECORD = struct.Struct("<qqqiiii")
"""number + 1, when called (ns), when done, index, line, description, what had been raised"""
DONE_AT = 2
"""Offset in a record, in units of 8 bytes."""
MAY_GIVE_UP = -1
"""In the place of when it was done: it is not, and has a time limit of its own."""
TEXTS = RING + RECORD.size * CAPACITY
LENGTH = TEXTS + TEXT
TIME_LIMIT = "time limit"
"""Name of a thread that only reports that the time is up."""
HARMLESS = ("MainThread", "launcher", "watch the peers", "close the process group", "tqdm_monitor", TIME_LIMIT)
"""Names of threads that call no operation, or are not among the others."""
Description = tuple[str, str, tuple[int, ...], Any, Any, "int | None", int]
"""kind, name, group, shape, dtype, peer, tag: see `Operation`. The types are torch's own."""
Known = tuple[int, int]
"""The number of a description, and the place of its channel's count."""


def open_box(rank: int, size: int, world: str) -> Box | None:
    """This process's black box. `world` is the same for all ranks of a world, and for no others. None if it is turned
    off, or the system has no such memory."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        return Box(rank, size, world)
    return None


class Box:
    """A rank's own black box, to write to."""

    def __init__(self, rank: int, size: int, world: str) -> None:
        """Raises `OSError`."""
        self.file = os.memfd_create(NAME)
        os.ftruncate(self.file, LENGTH)
        self.memory = mmap.mmap(self.file, LENGTH)
        self.octets = memoryview(self.memory)
        self.words = self.octets[:TEXTS].cast("q")
        self.words[TITLE], self.words[PID], self.words[RANK], self.words[SIZE] = MAGIC, os.getpid(), rank, size
        self.world = world
        self.one_at_a_time = threading.RLock()
        """Held by a thread that writes what is new."""
        self.main_thread = threading.main_thread().ident

    def begin_program(self) -> None:
        """A program begins, in a process group of its own: nothing has been called there."""
        words = self.words
        self.next_number = itertools.count(words[NEXT]).__next__  # atomic, as it is one call into C
        self.known: dict[Any, Known] = {}
        """By whatever whoever calls operations looks them up by."""
        self.described: dict[Description, Known] = {}
        self.channels: dict[Any, int] = {}
        self.raised: dict[str, int] = {}
        self.lines_written = itertools.count()
        self.sources = Sources(lambda line: self.write("line", f"{Path(line[0]).name}:{line[1]} in {line[2]}"))
        words[MAIN], words[USED] = NONE, 0
        self.around = NONE
        """The operation of the main thread in which it may call others."""
        self.write("world", self.world, words[NEXT])
        for place in range(COUNTS, COUNTS + MOST_CHANNELS):
            words[place] = 0
        self.call = self.make_call()
        words[PROGRAMS] += 1

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

    def describe(self, key: Any, description: Description) -> Known:
        """From now on, operations like this are known by `key`."""
        with self.one_at_a_time:
            if description not in self.described:
                kind, name, group, _, _, peer, tag = description
                channel = channel_of(kind, name, group, peer, tag)
                if channel not in self.channels:
                    place = COUNTS + min(len(self.channels), MOST_CHANNELS - 1)  # see `RankState.has_other_threads`
                    self.channels[channel] = place
                    self.write("channel", place, *channel)
                self.described[description] = self.write("operation", *map(plain, description)), self.channels[channel]
            self.known[key] = self.described[description]
            return self.known[key]

    def make_call(self) -> Callable[[Known, int, bool], int]:
        """What is called at each operation: it has all that it needs at hand."""
        words, memory, pack, length = self.words, self.memory, RECORD.pack_into, RECORD.size
        next_number, find, now, exc_info = self.next_number, self.sources.find, time.monotonic_ns, sys.exc_info

        def call(known: Known, depth: int, may_give_up: bool) -> int:
            """An operation is called, by the program's innermost line from `depth` frames above this one on. Returns
            its number."""
            description, place = known
            number, index = next_number(), words[place]
            error = exc_info()[1]
            raised = NONE if error is None else self.note_raised(error)
            record = RING + length * (number % CAPACITY)
            pack(memory, record, number + 1, now(), -may_give_up, index, find(depth), description, raised)
            words[place], words[NEXT] = index + 1, number + 1
            return number

        return call

    def take_back(self, number: int, known: Known) -> None:
        """The operation was refused before it began: it does not count, and meets none of the others'."""
        self.words[known[1]] -= 1
        self.words[RING // 8 + RECORD.size // 8 * (number % CAPACITY)] = 0

    def note_raised(self, error: BaseException) -> int:
        """The number of an exception, which is written to the text if it is new."""
        said = traceback.format_exception_only(error)[-1].partition("\n")[0]
        if said not in self.raised:
            self.raised[said] = self.write("raised", said)
        return self.raised[said]

    def end(self, number: int) -> None:
        """The operation is over."""
        place = RING // 8 + RECORD.size // 8 * (number % CAPACITY)
        if self.words[place] == number + 1:  # otherwise a later one has taken its place
            self.words[place + DONE_AT] = time.monotonic_ns()

    def limit(self, number: int) -> None:
        """The operation has a time limit of its own from now on."""
        place = RING // 8 + RECORD.size // 8 * (number % CAPACITY)
        if self.words[place] == number + 1:
            self.words[place + DONE_AT] = MAY_GIVE_UP


def plain(value: Any) -> Any:
    """As it is written: torch's types by their names, without a module's."""
    return value if value is None or isinstance(value, int | str | tuple) else str(value).rpartition(".")[2]


class View:
    """A rank's black box as others see it."""

    def __init__(self, pid: int, file: int) -> None:
        """The box that process `pid` has opened as `file`. Raises `OSError` if it cannot be opened, `ValueError` if it
        is no box, or one of another version."""
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(opened, LENGTH, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self.pid = pid
        self.words = memoryview(self.memory)[: 8 * COUNTS].cast("q")
        if self.words[TITLE] != MAGIC:
            raise ValueError(f"the black box of process {pid} is of another version")

    @property
    def progress(self) -> object:
        """Stays the same as long as the main thread sleeps, or is stopped, in one operation, or is in none, and the
        program has not returned."""
        status = process_status(self.pid, "task", str(self.pid)) if self.waits else []
        used = status[11:13]  # ticks of the processor, as user and system
        return self.words[NEXT], self.words[MAIN], self.words[ENDED], used, status[:1] == [b"T"]

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
        """What the rank does, with its latest operations. What is half written is left out."""
        content = self.memory[:]
        words = memoryview(content)[:RING].cast("q")
        text = content[TEXTS : TEXTS + min(max(words[USED], 0), TEXT)]
        lines = read_lines(text)
        is_whole = len(lines) == text.count(b"\n") and len(text) < TEXT - 1024
        first = lines[0][2] if lines else words[NEXT]
        main, now = words[MAIN], time.monotonic()
        numbers = [*range(max(first, words[NEXT] - latest), words[NEXT])]
        numbers = numbers if main in numbers or main < first else [main, *numbers]
        operations = {number: read for number in numbers if (read := read_operation(content, number, main, lines))}
        counts = {(a, tuple(b), c, d): words[place] for about, place, a, b, c, d in of(lines, "channel")}
        inside = operations.get(main)
        latest_times = [max(operation.issued, operation.done) for operation in operations.values()]
        return RankState(
            rank=words[RANK],
            doing=FINISHED if self.has_ended else IN_OPERATION if inside else IN_PROGRAM,
            operations=tuple(operations.values()),
            waits_for=inside,
            counts=counts,
            since=now - (inside.issued if inside else max(latest_times, default=now)),
            has_other_threads=len(counts) >= MOST_CHANNELS - 1 or not is_whole,
        )

    def read_since(self, progress: object, latest: int = CAPACITY) -> RankState:
        """What the rank does: if it is in an operation, but has gone on since its progress was this, it is in the
        program, and about to do something else."""
        state = self.read(latest)
        if is_stopped(self.pid):
            return replace(state, doing=STOPPED)
        moves = state.doing == IN_OPERATION and self.progress != progress
        return replace(state, doing=IN_PROGRAM) if moves else state

    @property
    def world(self) -> tuple[str, int] | None:
        """The name of its world, and how many ranks that has; None before the first program."""
        lines = read_lines(self.memory[TEXTS : TEXTS + 1024])
        return (lines[0][1], self.words[SIZE]) if lines else None


def read_lines(text: bytes) -> list[list[Any]]:
    """The lines of the text, up to the first that is not whole."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def of(lines: list[list[Any]], about: str) -> list[list[Any]]:
    return [line for line in lines if line[0] == about]


def read_operation(content: bytes, number: int, main: int, lines: list[list[Any]]) -> Operation | None:
    """The operation with this number; None if it is not whole."""
    record = RECORD.unpack_from(content, RING + RECORD.size * (number % CAPACITY))
    written, called, done, index, line, description, raised = record
    if written != number + 1 or not 0 <= description < len(lines) or lines[description][0] != "operation":
        return None
    _, kind, name, group, shape, dtype, peer, tag = lines[description]
    return Operation(
        kind=kind, name=name, group=tuple(group), shape=tuple(shape), dtype=dtype, peer=peer, tag=tag, index=index,
        line=lines[line][1] if 0 <= line < len(lines) else "",
        raised=lines[raised][1] if 0 <= raised < len(lines) else "",
        state=DONE if done > 0 else AWAITED if number == main else ISSUED,
        issued=called / 1e9, done=max(done, 0) / 1e9, may_give_up=done == MAY_GIVE_UP,
    )  # fmt: skip


def count_other_threads() -> int:
    """The number of threads of this process that may call operations, besides the main one."""
    return sum(thread.name not in HARMLESS for thread in threading.enumerate())


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
    """The black boxes of these processes, of those that may be looked at. (A launcher has those of its ranks open.)"""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            files = (file for file in os.listdir(f"/proc/{pid}/fd") if is_box(f"/proc/{pid}/fd/{file}"))
            views = (View(pid, int(file)) for file in files)
            if own := next((view for view in views if view.words[PID] == pid), None):
                yield own


def is_box(path: str) -> bool:
    with contextlib.suppress(OSError):  # it has been closed since
        return os.readlink(path).startswith(f"/memfd:{NAME}")
    return False
