"""In a rank: records events, straight into a file that outlives it, and the things that they refer
to by number: names, shapes, groups and lines of the program. Does not import torch.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playground.base.event_log import HEADER, NONE, EventLog, Format, Table, map_file
from playground.explain.hang.sources import Sources
from playground.explain.replay.record import layout
from playground.explain.replay.record.layout import (
    LANE_CODES,
    LOG,
    MAX_VALUES,
    RECORD,
    SPAN,
    VALUES_USED,
    offset_of,
)
from playground.explain.replay.record.recording import BACKGROUND, KINDS, MAIN, WAIT

pack_into = RECORD.pack_into
LENGTH, WORDS, HALVES = RECORD.size, RECORD.size // 8, RECORD.size // 4
"""The length of a record in units of 1, 8 and 4 bytes."""
FIRST = 8 * HEADER
"""The offset of the first record, in bytes."""
START_AT, END_AT, VALUES_AT = ((FIRST + offset_of(f)) // 8 for f in ("start", "end", "values"))
PEER_AT, MESSAGE_AT, WAIT_AT = ((FIRST + offset_of(f)) // 4 for f in ("peer", "message", "wait"))
LANE_AT = FIRST + offset_of("lane")
"""Offsets of fields of the first record, in units of 8, 4 and 1 bytes."""
KIND_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}
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


class Recorder(EventLog):
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
        log: Format = LOG,
        clock: Callable[[], int] = time.perf_counter_ns,
        **about: object,
    ) -> None:
        """`clock` returns nanoseconds; `about` describes the rank."""
        self.rank = rank
        self.clock = clock
        self.thread = ThreadState()
        self.backwards: list[int] = []
        """Numbers of the running backward passes, in order. Autograd calls hooks in threads of its
        own, one per GPU."""
        self.values_used = 0
        self.values_at = log.words_at
        """The offset of the values, in bytes."""
        file = folder / layout.file_name(rank, layout.WHOLE)
        try:
            super().__init__(log, map_file(file, log.size))
        except OSError as error:
            with contextlib.suppress(OSError):
                file.unlink()
            super().__init__(log, mmap.mmap(-1, log.size))
            self.let_go()
            notice = (
                f"--see: nothing can be written to {folder} ({error.strerror}): rank {rank} "
                "runs unrecorded"
            )
            with contextlib.suppress(OSError, ValueError):  # stderr is gone, too
                print(notice, file=sys.stderr, flush=True)
        self.names, self.shapes = Table(self, layout.NAME), Table(self, layout.SHAPE)
        self.groups = Table(self, layout.GROUP)
        self.sources = Sources(Table(self, layout.SOURCE).__getitem__)
        self.write(layout.START, {"time": time.time(), "clock": clock(), **about})

    def begin(
        self,
        kind: str,
        name: str,
        *,
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
        pack_into(
            self.memory, FIRST + LENGTH * number, start, 0, nbytes, offset, NONE,
            thread.parent if parent is None else parent, peer, message, tag,
            NONE, source, shape_number, name_number, group_number, thread.lane, KIND_CODES[kind],
        )  # fmt: skip
        return number

    def end(self, number: int) -> None:
        """Record the end of an event, now."""
        self.words[WORDS * number + END_AT] = self.clock()

    def end_all(self, numbers: Iterable[int]) -> None:
        """Record the end of all these events, now."""
        now, words = self.clock(), self.words
        for number in numbers:
            words[WORDS * number + END_AT] = now

    def instant(
        self,
        kind: str,
        name: str,
        values: Sequence[float] | None = None,
        *,
        nbytes: int = 0,
        shape: Sequence[int] = (),
        parent: int | None = None,
    ) -> None:
        """Record an event that takes no time."""
        number, words = (
            self.begin(kind, name, nbytes=nbytes, shape=shape, parent=parent),
            self.words,
        )
        words[WORDS * number + END_AT] = words[WORDS * number + START_AT]
        self.put_values(number, values)

    def put_values(self, number: int, values: Sequence[float] | None) -> None:
        """Record the values of an event's tensor, if there is room for them."""
        if values is None or len(values) > MAX_VALUES:
            return
        count = len(values)
        with self.one_at_a_time:
            position = self.values_used
            if position + count > self.format.words:
                return
            self.values_used = self.words[VALUES_USED] = position + count
        FLOATS[count].pack_into(self.memory, self.values_at + 8 * position, *values)
        self.words[WORDS * number + VALUES_AT] = position * SPAN + count

    def set_lane(self, number: int, lane: int) -> None:
        self.octets[LENGTH * number + LANE_AT] = lane

    def begin_wait(self, numbers: Iterable[int], source: int) -> int:
        """Record the start of a wait for these events. Returns its number."""
        wait, halves = self.begin(WAIT, "wait", source=source), self.halves
        for number in numbers:
            halves[HALVES * number + WAIT_AT] = wait
        return wait

    def note_sender(self, number: int, peer: int, message: int) -> None:
        """Record the sender of a message that was received from anyone."""
        place = HALVES * number
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
        thread, span = self.thread, NONE
        while thread.parent != NONE and span != number:
            span = thread.parent
            thread.parent = thread.spans.pop()
            self.end(span)

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
        """Mark the end of the recording. Later events, of a late thread, are lost."""
        while self.thread.parent != NONE:
            self.close(self.thread.parent)
        self.write(layout.ENDED, self.clock())
        self.let_go()
