"""Inside a rank: writes down what happens, an event a record, straight into a file that outlives the rank."""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playground.recording.layout import (
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
)  # fmt: skip
from playground.recording.memory import Nowhere, map_file
from playground.recording.recording import BACKGROUND, MAIN, PHASE, WAIT
from playground.recording.sources import Sources
from playground.recording.tables import END as ENDED, GROUP, NAME, SHAPE, SOURCE, START, Table, Tables

CAPACITY, VALUE_CAPACITY = 2**18, 2**20
"""Events, and values of small tensors, for which there is room: 21 and 8 MB, of which only what is used takes any."""
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
    which there is no room is counted, and its number leads to a record that nobody reads.
    """

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
        self.clock, self.capacity, self.value_capacity = clock, capacity, value_capacity
        self.room = capacity + reserve
        self.tables = Tables(folder / file_name(rank, TABLES))
        self.names, self.shapes = Table(self.tables, NAME), Table(self.tables, SHAPE)
        self.groups, self.sources = Table(self.tables, GROUP), Sources(Table(self.tables, SOURCE))
        self.memory = map_file(folder / file_name(rank, EVENTS), HEADER.size + RECORD.size * (self.room + 1))
        self.value_memory = map_file(folder / file_name(rank, VALUES), 8 * value_capacity)
        self.target: Any = self.memory
        self.value_target: Any = self.value_memory
        self.octets: Any = memoryview(self.memory)
        self.words: Any = self.octets.cast("q")
        self.halves: Any = self.octets.cast("i")
        HEADER.pack_into(self.memory, 0, MAGIC, self.room, 0, 0)
        self.next_number = itertools.count().__next__  # atomic, as it is one call into C
        self.values_used = 0
        self.values_lock = threading.Lock()
        self.thread = ThreadState()
        self.backwards: list[int] = []
        """The numbers of the backward passes under way, the last to begin last: autograd has a thread for each GPU, and
        calls hooks in it."""
        self.tables.write(START, {"time": time.time(), "clock": clock(), **about})

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
        number = self.take_number()
        thread = self.thread
        RECORD.pack_into(
            self.target, RECORD.size * (number + 1), start, 0, nbytes, offset, NONE,
            thread.parent if parent is None else parent, peer, message, tag,
            NONE, source, self.shapes[shape], self.names[name], self.groups[group], thread.lane, KIND_CODES[kind],
        )  # fmt: skip
        return number

    def take_number(self) -> int:
        """Of the next record, if there is room for one."""
        number = self.next_number()
        if number >= self.capacity:
            self.words[DROPPED_AT] = number + 1 - self.capacity
            return self.room
        return number

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
            if position + count > self.value_capacity:
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
        self.capacity = self.room = self.value_capacity = 0
        self.target, self.value_target = bytearray(HEADER.size + RECORD.size), bytearray(8)
        self.words = self.halves = self.octets = Nowhere()
        for view in views:
            view.release()
        self.memory.close()
        self.value_memory.close()
        self.tables.close()
