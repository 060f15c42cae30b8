"""Inside a rank: writes down what happens, an event a record, straight into a file that outlives the rank."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playground.see.record.layout import (
    CAPACITY_AT,
    DROPPED_AT,
    END,
    EVENTS,
    HALVES,
    HEADER,
    KIND_CODES,
    LANE_AT,
    LANE_CODES,
    MAGIC,
    MAX_VALUES,
    MESSAGE_AT,
    NONE,
    PEER_AT,
    RECORD,
    SPAN,
    TABLES,
    VALUES,
    VALUES_AT,
    VALUES_USED_AT,
    WAIT_AT,
    WORDS,
    file_name,
)
from playground.see.record.recording import BACKGROUND, MAIN, PHASE, WAIT
from playground.see.record.tables import END as ENDED, GROUP, NAME, SHAPE, SOURCE, START, Sources, Table, Tables

PIECE = 2**20
"""Bytes that a file is given of the disk at a time."""


class Nowhere:
    """Memory that takes everything and keeps nothing."""

    def __getitem__(self, place: int) -> int:
        return 0

    def __setitem__(self, place: int, value: int) -> None:
        pass

    def release(self) -> None:
        pass


class MappedFile:
    """A new file of zeros, as memory that this process shares with it.

    Writing to a part of a mapped file for which the disk has no room ends the process by SIGBUS: nothing may be written
    beyond `allocated`, where the disk has set its room aside.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self.size, self.allocated = size, 0
        """In bytes."""
        try:
            os.ftruncate(self.file, size)
            self.memory = mmap.mmap(self.file, size)
        except BaseException:
            os.close(self.file)
            raise

    def allocate_next(self) -> None:
        """Set room aside for the next `PIECE`. Raises `OSError` where there is none."""
        length = min(PIECE, self.size - self.allocated)
        self.allocate(self.allocated, length)
        self.allocated += length

    def allocate(self, place: int, length: int) -> None:
        """Set room aside for a part in which nothing has been written yet. Raises `OSError` where there is none."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file, place, length)
        else:
            os.pwrite(self.file, bytes(length), place)

    def close(self) -> None:
        """Nobody may use the memory any more."""
        self.memory.close()
        os.close(self.file)


CAPACITY, VALUE_CAPACITY = 2**18, 2**20
"""Events, and values of small tensors, that are recorded at most: 21 and 8 MB, which the disk gives piece by piece."""
FLOATS = [struct.Struct(f"{count}d") for count in range(MAX_VALUES + 1)]


class ThreadState(threading.local):
    """What a thread is at."""

    def __init__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.lane = LANE_CODES[MAIN if main else BACKGROUND]
        self.parent = NONE
        """The number of the span that is open, the innermost of them."""
        self.spans: list[int] = []
        """The numbers of the spans around that one."""
        self.is_inside = False
        """Whether what happens now is part of a call that is recorded as a whole."""
        self.batch: list[Any] | None = None
        """The messages of a batch that is being started."""
        self.device: Any = None
        """The one of several devices whose work this thread does; None for the rank's own."""


class Recorder:
    """One rank's recording, while it is made.

    `begin` returns a number, and `end` takes it; in between other events may begin and end, in any thread. An event for
    which there is no room is counted, and its number leads to a record that nobody reads. So it is with all that happen
    after the disk was full.
    """

    target: Any
    value_target: Any
    """What events and values are written to."""
    octets: Any
    words: Any
    halves: Any
    """The events' once more, in units of 1, 8 and 4 bytes."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        capacity: int = CAPACITY,
        reserve: int = 0,
        value_capacity: int = VALUE_CAPACITY,
        clock: Callable[[], int] = time.perf_counter_ns,
        **about: object,
    ) -> None:
        """`clock` gives nanoseconds; `about` is what else is to be known of the rank. Behind the room for `capacity`
        events there is some in `reserve`, which `begin` does not use."""
        self.folder, self.rank, self.clock = folder, rank, clock
        self.next_number = itertools.count().__next__  # atomic, as it is one call into C
        self.values_used = 0
        self.values_lock, self.growing = threading.Lock(), threading.Lock()
        self.thread = ThreadState()
        self.backwards: list[int] = []
        """The numbers of the backward passes under way, the last to begin last: autograd has a thread for each GPU, and
        calls hooks in it."""
        self.is_full = False
        self.files: list[MappedFile] = []
        self.write_nowhere()
        self.tables = Tables(folder / file_name(rank, TABLES), self.give_up)
        self.names, self.shapes = Table(self.tables, NAME), Table(self.tables, SHAPE)
        self.groups, self.sources = Table(self.tables, GROUP), Sources(Table(self.tables, SOURCE))
        try:
            self.map_files(folder, rank, capacity, reserve, value_capacity)
        except OSError as error:
            self.give_up(str(error.strerror))
        self.tables.write(START, {"time": time.time(), "clock": clock(), **about})

    def map_files(self, folder: Path, rank: int, capacity: int, reserve: int, value_capacity: int) -> None:
        """Make the files, and write to them from now on. Raises `OSError`."""
        room = capacity + reserve
        events_size = HEADER.size + RECORD.size * (room + 1)
        for kind, size in ((EVENTS, events_size), (VALUES, 8 * value_capacity)):
            self.files.append(MappedFile(folder / file_name(rank, kind), size))
        events, values = self.files
        events.allocate(0, HEADER.size)
        events.allocate(RECORD.size * (room + 1), RECORD.size)
        self.max_capacity, self.max_value_capacity, self.unread = capacity, value_capacity, room
        self.target, self.value_target, self.octets = events.memory, values.memory, memoryview(events.memory)
        self.words, self.halves = self.octets.cast("q"), self.octets.cast("i")
        HEADER.pack_into(self.target, 0, MAGIC, room, 0, 0)

    def write_nowhere(self) -> None:
        """From now on, what is recorded is lost."""
        self.capacity = self.value_capacity = 0
        """For which the disk has given room so far."""
        self.max_capacity = self.max_value_capacity = 0
        self.unread = 0
        """The number of events for which there is no room."""
        self.target, self.value_target = bytearray(HEADER.size + RECORD.size), bytearray(8)
        self.words = self.halves = self.octets = Nowhere()

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
        """Something begins: now, or at `start`; in the span that is open, or in `parent`.

        `shape` and `group` are tuples, `source` is what `sources.find` gives.
        """
        if start is None:
            start = self.clock()
        shape_number, name_number, group_number = self.shapes[shape], self.names[name], self.groups[group]
        number = self.take_number()  # after those: if there is no room for them, there is none for what refers to them
        thread = self.thread
        RECORD.pack_into(
            self.target, RECORD.size * (number + 1), start, 0, nbytes, offset, NONE,
            thread.parent if parent is None else parent, peer, message, tag,
            NONE, source, shape_number, name_number, group_number, thread.lane, KIND_CODES[kind],
        )  # fmt: skip
        return number

    def take_number(self) -> int:
        """Of the next record, if there is room for one."""
        number = self.next_number()
        if number >= self.capacity and not self.make_room(number):
            self.words[DROPPED_AT] = number + 1 - self.capacity
            return self.unread
        return number

    def make_room(self, number: int) -> bool:
        """Have the disk give room for the record of that number, and those up to it. Returns whether there is."""
        with self.growing:
            while self.capacity <= number and self.capacity < self.max_capacity:
                try:
                    self.files[0].allocate_next()
                except OSError as error:
                    self.give_up(str(error.strerror), self.capacity)
                    break
                self.capacity = min(self.max_capacity, (self.files[0].allocated - HEADER.size) // RECORD.size)
        return number < self.capacity

    def use_reserve(self) -> int:
        """Open the room in reserve. What threads are late with finds none from here on. Returns the number of its first
        record."""
        number = self.next_number()
        first = min(number, self.max_capacity)
        self.capacity = self.max_capacity = min(number + 1, self.capacity)
        return first

    def make_reserve_room(self, number: int) -> bool:
        """Have the disk give room for a record in reserve. Returns whether there is."""
        while not self.is_full and (self.files[0].allocated - HEADER.size) // RECORD.size <= number:
            try:
                self.files[0].allocate_next()
            except OSError as error:
                self.give_up(str(error.strerror), number)
        return not self.is_full

    def make_value_room(self, count: int) -> bool:
        """The same for that many values."""
        while self.value_capacity < min(count, self.max_value_capacity):
            try:
                self.files[1].allocate_next()
            except OSError as error:
                self.give_up(str(error.strerror))
                break
            self.value_capacity = self.files[1].allocated // 8
        return count <= self.value_capacity

    def give_up(self, reason: str, end: int | None = None) -> None:
        """There is no room for more: what happens from now on is counted, and no more than that. Says so, once.

        Records end before the number `end`; without it, with those that have a number already.
        """
        if self.is_full:
            return
        self.is_full = True
        self.max_value_capacity = self.value_capacity
        if end is None:
            end = min(self.capacity, self.next_number() + 1)
        self.capacity = self.max_capacity = min(self.capacity, end)
        self.words[CAPACITY_AT] = end
        with contextlib.suppress(OSError, ValueError):  # nobody can be told
            print(
                f"--see: no more can be written to {self.folder} ({reason}): rank {self.rank} goes on unrecorded",
                file=sys.stderr,
                flush=True,
            )

    def end(self, number: int) -> None:
        """It is over, now."""
        self.words[WORDS * (number + 1) + END] = self.clock()

    def end_all(self, numbers: Iterable[int]) -> None:
        """All of these are over, now."""
        now, words = self.clock(), self.words
        for number in numbers:
            words[WORDS * (number + 1) + END] = now

    def resume(self, number: int) -> None:
        """It is not over yet."""
        self.words[WORDS * (number + 1) + END] = 0

    def instant(self, kind: str, name: str, values: Sequence[float] | None = None, **what: Any) -> None:
        """Something that takes no time."""
        number, words = self.begin(kind, name, **what), self.words
        word = WORDS * (number + 1)
        words[word + END] = words[word]
        if values is not None:
            self.put_values(number, values)

    def put_values(self, number: int, values: Sequence[float] | None) -> None:
        """Note what the event's tensor held, if there is room for it."""
        if values is None or len(values) > MAX_VALUES:
            return
        count = len(values)
        with self.values_lock:
            position = self.values_used
            if position + count > self.value_capacity and not self.make_value_room(position + count):
                return
            self.values_used = self.words[VALUES_USED_AT] = position + count
        FLOATS[count].pack_into(self.value_target, 8 * position, *values)
        self.words[WORDS * (number + 1) + VALUES_AT] = position * SPAN + count

    def set_lane(self, number: int, lane: int) -> None:
        self.octets[RECORD.size * (number + 1) + LANE_AT] = lane

    def begin_wait(self, numbers: Iterable[int], source: int) -> int:
        """This thread begins to wait for these events. Returns the number of the wait."""
        wait, halves = self.begin(WAIT, "wait", source=source), self.halves
        for number in numbers:
            halves[HALVES * (number + 1) + WAIT_AT] = wait
        return wait

    def note_sender(self, number: int, peer: int, message: int) -> None:
        """Who it was that a message came from."""
        place = HALVES * (number + 1)
        self.halves[place + PEER_AT], self.halves[place + MESSAGE_AT] = peer, message

    def open(self, number: int) -> int:
        """What this thread does next belongs to the event `number`, until `close`. Returns the number."""
        thread = self.thread
        thread.spans.append(thread.parent)
        thread.parent = number
        return number

    def close(self, number: int) -> None:
        """End a span of this thread, and those that are still open in it."""
        for span in self.leave(number):
            self.end(span)

    def leave(self, number: int) -> list[int]:
        """What this thread does next belongs to that span no more, nor to those open in it: to what is around it. They
        do not end by that; they are returned."""
        thread, left = self.thread, []
        while thread.parent != NONE and number not in left:
            left.append(thread.parent)
            thread.parent = thread.spans.pop()
        return left

    def is_open(self, number: int) -> bool:
        """Whether what this thread does next belongs to that span."""
        return number == self.thread.parent or number in self.thread.spans

    def around(self) -> int:
        """The number of the span that a hook of autograd is called in: this thread's or, in one of autograd's own,
        that of the backward pass."""
        parent = self.thread.parent
        return parent if parent != NONE or not self.backwards else self.backwards[-1]

    @contextlib.contextmanager
    def span(self, kind: str, name: str) -> Iterator[int]:
        """What this thread does in this block, as an event: its number."""
        number = self.open(self.begin(kind, name, source=self.sources.find()))
        try:
            yield number
        finally:
            self.close(number)

    @contextlib.contextmanager
    def working_for(self, device: Any) -> Iterator[None]:
        """What this thread does in this block is the work of that one of several devices: a phase of its name."""
        with self.span(PHASE, str(device)):
            yield

    def stop(self) -> None:
        """The rank tells that its recording ends."""
        while self.thread.parent != NONE:
            self.close(self.thread.parent)
        self.tables.write(ENDED, self.clock())
        self.let_go()

    def let_go(self) -> None:
        """Of the files: what is recorded from now on, by a thread that is late or in a process forked from this one, is
        lost."""
        views = self.words, self.halves, self.octets
        self.write_nowhere()
        for view in views:
            view.release()
        for file in self.files:
            file.close()
        self.tables.close()
