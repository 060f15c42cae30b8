"""In a rank: records events, straight into a file that outlives it, and the things that they refer
to by number: names, shapes, groups and lines of the program. Does not import torch.
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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playground.runtime.files import create
from playground.runtime.flight_recorder.sources import Sources
from playground.trace.record import BACKGROUND, KINDS, MAIN, WAIT, layout
from playground.trace.record.layout import (
    HEADER,
    LANE_CODES,
    MAX_VALUES,
    NONE,
    RECORD,
    SPAN,
    file_name,
    place_of,
)


class Tables:
    """A file of lines of JSON that are passed to the system at once, so that they outlive this
    process. Those for which there is no room are lost."""

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(descriptor, "w", buffering=1)

    def write(self, about: str, *values: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            self.file.write(json.dumps([about, *values]) + "\n")

    def close(self) -> None:
        """Close the file. Later lines are lost."""
        with contextlib.suppress(OSError):
            self.file.close()


class Numbering(dict[Hashable, int]):
    """Numbers things from 0 on, and writes each to the tables when it is first asked for."""

    def __init__(self, tables: Tables, about: str) -> None:
        super().__init__()
        self.tables = tables
        self.about = about
        self.one_at_a_time = threading.Lock()

    def __missing__(self, thing: Hashable) -> int:
        with self.one_at_a_time:
            if thing not in self:
                self.tables.write(self.about, thing)
                self[thing] = len(self)
        return self[thing]


def map_file(path: Path, size: int) -> mmap.mmap:
    """A new file of zeros, mapped into memory. The disk allocates all of its room: writing to a
    part of a mapped file for which it has none ends the process by SIGBUS. Raises `OSError`."""
    file = create(path)
    try:
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


WORDS, HALVES = RECORD.size // 8, RECORD.size // 4
"""The length of a record in units of 8 and of 4 bytes."""
END, VALUES_AT = 1, 4
PEER_AT, MESSAGE_AT, WAIT_AT = 11, 12, 14
LANE_AT = 76
"""Offsets in a record, in units of 8, 4 and 1 bytes."""
DROPPED_AT, VALUES_USED_AT = 2, 3
"""Offsets in the header, in units of 8 bytes."""
KIND_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}
CAPACITY, VALUE_CAPACITY = 2**18, 2**20
"""Maximum numbers of events and of values of small tensors: 21 and 8 MB on the disk, until the run
is over."""
FLOATS = [struct.Struct(f"{count}d") for count in range(MAX_VALUES + 1)]


class ThreadState(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.lane = LANE_CODES[MAIN if main else BACKGROUND]
        self.parent = NONE
        """Number of the innermost open span."""
        self.spans: list[int] = []
        """Numbers of the spans around that one."""
        self.is_inside = False
        """Whether the thread is inside a call that is recorded as a whole."""
        self.flat: Any = None
        """The tensor of our collective that the thread is running."""
        self.phase = ""
        self.phase_number = NONE
        """The phase of it, and the number of its event."""


class Recorder:
    """Records the events of one rank.

    `begin` returns a number, and `end` takes it; in between other events may begin and end, in any
    thread. Events for which there is no room are counted; their number is that of a record that is
    never read. Where there is no room for any of them, a notice says so.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        capacity: int = CAPACITY,
        value_capacity: int = VALUE_CAPACITY,
        clock: Callable[[], int] = time.perf_counter_ns,
        **about: object,
    ) -> None:
        """`clock` returns nanoseconds; `about` describes the rank."""
        self.folder = folder
        self.rank = rank
        self.clock = clock
        self.next_number = itertools.count().__next__  # atomic, as it is one call into C
        self.one_at_a_time = threading.Lock()
        self.thread = ThreadState()
        self.backwards: list[int] = []
        """Numbers of the running backward passes, in order. Autograd calls hooks in threads of its
        own, one per GPU."""
        self.capacity = capacity
        self.value_capacity = value_capacity
        self.unread = capacity
        """The number given to events for which there is no room."""
        self.sizes = place_of(capacity + 1), 8 * value_capacity
        files = [
            folder / file_name(rank, kind) for kind in (layout.TABLES, layout.EVENTS, layout.VALUES)
        ]
        try:
            self.tables = Tables(create(files[0]))
            self.write_to(*map(map_file, files[1:], self.sizes))
        except OSError as error:
            for file in files:
                with contextlib.suppress(OSError):
                    file.unlink()
            self.capacity = self.value_capacity = 0
            self.tables = Tables(os.open(os.devnull, os.O_WRONLY))
            self.write_nowhere()
            notice = (
                f"--see: nothing can be written to {folder} ({error.strerror}): rank {rank} "
                "runs unrecorded"
            )
            with contextlib.suppress(OSError, ValueError):  # stderr is gone, too
                print(notice, file=sys.stderr, flush=True)
        self.names, self.shapes = (
            Numbering(self.tables, layout.NAME),
            Numbering(self.tables, layout.SHAPE),
        )
        self.groups = Numbering(self.tables, layout.GROUP)
        self.sources = Sources(Numbering(self.tables, layout.SOURCE).__getitem__)
        self.tables.write(layout.START, {"time": time.time(), "clock": clock(), **about})

    def write_nowhere(self) -> None:
        """Discard whatever is recorded from now on: it goes to memory of this process, which takes
        none until then."""
        self.write_to(*(mmap.mmap(-1, size) for size in self.sizes))

    def write_to(self, events: mmap.mmap, values: mmap.mmap) -> None:
        """Write events and values to this memory from now on."""
        self.target = events
        self.value_target = values
        self.octets = memoryview(events)
        """The memory of events, in units of 1, 8 and 4 bytes."""
        self.words, self.halves = self.octets.cast("q"), self.octets.cast("i")
        self.values_used = 0
        HEADER.pack_into(events, 0, layout.MAGIC, self.unread, 0, 0)

    def begin(
        self,
        kind: str,
        name: str,
        nbytes: int = 0,
        shape: Sequence[int] = (),
        group: Sequence[int] = (),
        peer: int = NONE,
        message: int = NONE,
        tag: int = 0,
        offset: int = NONE,
        source: int = NONE,
        start: int | None = None,
        parent: int | None = None,
    ) -> int:
        """Record the start of an event: now or at `start`, in the open span or in `parent`. Returns
        its number.

        `shape` and `group` are tuples, `source` is a result of `sources.find`.
        """
        if start is None:
            start = self.clock()
        shape_number = self.shapes[shape]
        name_number = self.names[name]
        group_number = self.groups[group]
        number = self.take_number()
        thread = self.thread
        RECORD.pack_into(
            self.target, RECORD.size * (number + 1), start, 0, nbytes, offset, NONE,
            thread.parent if parent is None else parent, peer, message, tag,
            NONE, source, shape_number, name_number, group_number, thread.lane, KIND_CODES[kind],
        )  # fmt: skip
        return number

    def take_number(self) -> int:
        """The number of the next record, or `unread` if there is no room for one."""
        number = self.next_number()
        if number >= self.capacity:
            self.words[DROPPED_AT] = number + 1 - self.capacity
            return self.unread
        return number

    def end(self, number: int) -> None:
        """Record the end of an event, now."""
        self.words[WORDS * (number + 1) + END] = self.clock()

    def end_once(self, numbers: Iterable[int]) -> None:
        """Record the end of these events, unless they are over: of two threads that learn of it the
        first counts."""
        with self.one_at_a_time:
            self.end_all(
                [number for number in numbers if not self.words[WORDS * (number + 1) + END]]
            )

    def end_all(self, numbers: Iterable[int]) -> None:
        """Record the end of all these events, now."""
        now, words = self.clock(), self.words
        for number in numbers:
            words[WORDS * (number + 1) + END] = now

    def instant(
        self, kind: str, name: str, values: Sequence[float] | None = None, **what: Any
    ) -> None:
        """Record an event that takes no time."""
        number, words = self.begin(kind, name, **what), self.words
        words[WORDS * (number + 1) + END] = words[WORDS * (number + 1)]
        self.put_values(number, values)

    def put_values(self, number: int, values: Sequence[float] | None) -> None:
        """Record the values of an event's tensor, if there is room for them."""
        if values is None or len(values) > MAX_VALUES:
            return
        count = len(values)
        with self.one_at_a_time:
            position = self.values_used
            if position + count > self.value_capacity:
                return
            self.values_used = self.words[VALUES_USED_AT] = position + count
        FLOATS[count].pack_into(self.value_target, 8 * position, *values)
        self.words[WORDS * (number + 1) + VALUES_AT] = position * SPAN + count

    def set_lane(self, number: int, lane: int) -> None:
        self.octets[RECORD.size * (number + 1) + LANE_AT] = lane

    def begin_wait(self, numbers: Iterable[int], source: int) -> int:
        """Record the start of a wait for these events. Returns its number."""
        wait, halves = self.begin(WAIT, "wait", source=source), self.halves
        for number in numbers:
            halves[HALVES * (number + 1) + WAIT_AT] = wait
        return wait

    def note_sender(self, number: int, peer: int, message: int) -> None:
        """Record the sender of a message that was received from anyone."""
        place = HALVES * (number + 1)
        self.halves[place + PEER_AT] = peer
        self.halves[place + MESSAGE_AT] = message

    def open(self, number: int) -> int:
        """Make the event the parent of this thread's next events, until `close`. Returns its
        number."""
        thread = self.thread
        thread.spans.append(thread.parent)
        thread.parent = number
        return number

    def close(self, number: int) -> None:
        """End a span of this thread, and those open in it."""
        for span in self.leave(number):
            self.end(span)

    def leave(self, number: int) -> list[int]:
        """Make the span around this one the parent of this thread's next events. Returns this span
        and those open in it, none of which has ended by that."""
        thread, left = self.thread, []
        while thread.parent != NONE and number not in left:
            left.append(thread.parent)
            thread.parent = thread.spans.pop()
        return left

    def is_open(self, number: int) -> bool:
        """Whether this thread is in that span."""
        return number == self.thread.parent or number in self.thread.spans

    def around(self) -> int:
        """The span around a hook of autograd: this thread's or, in a thread of autograd's, the
        backward pass."""
        parent = self.thread.parent
        return parent if parent != NONE or not self.backwards else self.backwards[-1]

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[int]:
        """Record this thread's block as an event. Yields its number."""
        number = self.open(self.begin(kind, name, source=self.sources.find()))
        try:
            yield number
        finally:
            self.close(number)

    def stop(self) -> None:
        """Mark the end of the recording, and close its files."""
        while self.thread.parent != NONE:
            self.close(self.thread.parent)
        self.tables.write(layout.ENDED, self.clock())
        self.let_go()

    def let_go(self) -> None:
        """Close the files. Later events, of a late thread or in a process forked from this one, are
        lost."""
        views, files = (self.words, self.halves, self.octets), (self.target, self.value_target)
        self.write_nowhere()
        for each in views:
            each.release()
        for file in files:
            file.close()
        self.tables.close()
