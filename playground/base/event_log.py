"""A log of events that outlives the process which writes it: records of a fixed size, and the
things that they refer to by number. A ring keeps the latest records, as the flight recorder does; a
linear log keeps the first ones, as `--see` does. Does not import torch.

A log is a file that is mapped into memory: a header of `HEADER` words of 8 bytes, the records, the
owner's words, and a text of JSON lines `[subject, thing]`. What holds of it:

- Killed: all that was written is there, as it is the system's memory that is written to. The last
  field of a record is its mark, which is 0 until the others are there; a line of the text counts
  when `USED` includes it, and is written before records refer to it. (When the machine fails, what
  is not on the disk by then is lost.)
- Read meanwhile: a record is whole or left out. Its mark is read before its other fields, and from
  a ring it is left out if it may have been overwritten since. This holds where stores are seen in
  their order, as on x86.
- Full: a ring overwrites its oldest records, and has no numbers for more things. A linear log
  stops at the first record or thing for which it has no room, and counts the records from then on.
- Threads: each record is written by one, and things are numbered by one at a time.
- Forked: the child shares the log, until it lets go of it.
- Others: a log in a folder is a new file, in which no link is followed. A reader maps nothing, so
  that it is not ended by SIGBUS when somebody cuts the file short, and refuses what is no log.

A record takes less than 1 µs, without a call to the system.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playground.base.files import create
from playground.base.untrusted import expect_list, parse_json

NONE = -1
"""In the place of a number: there is none."""
HEADER = 16
"""Number of words before the records."""
TITLE, CAPACITY, WORDS, TEXT, BEGUN, LIMIT, USED, OWN = range(8)
"""Places in the header, in units of 8 bytes: the fields of its `Format`, the number of records
begun so far, how many a linear log has room for, and the bytes used of the text. From `OWN` on they
are the owner's."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a log."""

    title: bytes
    """8 bytes: the kind of the log and its version."""
    record: struct.Struct
    """A multiple of 8 bytes. Its last field is the mark: in a ring the record's number plus 1, in a
    linear log anything but 0."""
    mark: struct.Struct
    """The mark alone, at its place in a record."""
    capacity: int
    """Number of records."""
    words: int
    """Number of the owner's words behind the records."""
    text: int = 2**22
    """Size of the text in bytes, a multiple of 8."""
    ring: bool = False

    def place_of(self, number: int) -> int:
        """The offset of a record, in bytes."""
        return 8 * HEADER + self.record.size * (number % self.capacity if self.ring else number)

    @property
    def words_at(self) -> int:
        """The offset of the owner's words, in bytes. Before them is room for one record more, which
        is never read."""
        return 8 * HEADER + self.record.size * (self.capacity + 1)

    @property
    def text_at(self) -> int:
        """The offset of the text, in bytes."""
        return self.words_at + 8 * self.words

    @property
    def size(self) -> int:
        """The size of the log in bytes."""
        return self.text_at + self.text


def map_file(path: Path, size: int) -> mmap.mmap:
    """A new file of zeros, mapped into memory. The disk allocates all of its room: writing to a
    part of a mapped file for which it has none ends the process by SIGBUS. Raises `OSError`."""
    file = create(path)
    try:
        os.posix_fallocate(file, 0, size)
        memory = mmap.mmap(file, size)
        memory.madvise(mmap.MADV_RANDOM)  # to read zeros ahead may take milliseconds
        return memory
    finally:
        os.close(file)


class EventLog:
    """A log to write to. Whoever inherits from it packs the records."""

    def __init__(self, format: Format, memory: mmap.mmap) -> None:
        """`memory` is `format.size` zeros."""
        self.format = format
        self.capacity = format.capacity
        """The number of records, or that at which a linear log has stopped."""
        self.one_at_a_time = threading.RLock()
        """Held by a thread that writes to the text."""
        self.write_to(memory)
        words = self.words
        words[CAPACITY] = words[LIMIT] = format.capacity
        words[WORDS] = format.words
        words[TEXT] = format.text
        words[TITLE] = int.from_bytes(format.title, "little")

    def write_to(self, memory: mmap.mmap) -> None:
        """Write to this memory from now on."""
        self.memory = memory
        self.octets = memoryview(memory)
        """The memory in units of 1, 8 and 4 bytes."""
        self.words, self.halves = self.octets.cast("q"), self.octets.cast("i")

    def let_go(self) -> None:
        """Discard what is written from now on. It goes to memory of this process, which takes none
        until then."""
        self.write_to(mmap.mmap(-1, self.format.size))
        self.words[USED] = self.format.text
        self.capacity = 0

    def take_number(self) -> int:
        """The number of the next record, from 0 on; of a linear log that has stopped, that of the
        room which is never read."""
        words = self.words
        # no other thread comes between: nothing is called in these lines
        number = words[BEGUN]
        words[BEGUN] = number + 1
        return number if number < self.capacity or self.format.ring else self.format.capacity

    def write(self, subject: str, thing: object) -> bool:
        """Write a line of the text. Returns whether there was room."""
        line = json.dumps((subject, thing)).encode() + b"\n"
        with self.one_at_a_time:
            used = self.words[USED]
            has_room = used + len(line) <= self.format.text
            if has_room:
                start = self.format.text_at + used
                self.octets[start : start + len(line)] = line
                self.words[USED] = used + len(line)
            elif not self.format.ring:
                self.capacity = min(self.capacity, self.words[BEGUN])
                self.words[LIMIT] = self.capacity
            return has_room


class Table(dict[Hashable, int]):
    """Numbers the things of a subject from 0 on, and writes each to the log's text when it is first
    asked for. `NONE` if there is no room."""

    def __init__(self, log: EventLog, subject: str) -> None:
        super().__init__()
        self.log = log
        self.subject = subject

    def __missing__(self, thing: Hashable) -> int:
        with self.log.one_at_a_time:
            if thing not in self:
                if not self.log.write(self.subject, thing):
                    return NONE
                self[thing] = len(self)
            return self[thing]


class LogReader:
    """A log as others read it."""

    def __init__(self, file: int, format: Format) -> None:
        """`file` is a descriptor, which is closed with the reader. The log may have other sizes
        than `format`, and none before it has begun. Raises `ValueError` if it is another or no log,
        or shorter than it says."""
        self.file = file
        # not at exit, where threads may still read it
        weakref.finalize(self, os.close, file).atexit = False
        title, capacity, words, text, *_ = self.read_header()
        if title.to_bytes(8, "little", signed=True) not in (format.title, bytes(8)):
            raise ValueError("it is no log, or one of another version")
        self.format = replace(format, capacity=capacity, words=words, text=text)
        if min(capacity, words, text) < 0 or (title and self.format.size > os.fstat(file).st_size):
            raise ValueError("it is shorter than it says")

    def read_bytes(self, start: int, end: int) -> bytes:
        """What lies between two offsets, in bytes. What is missing is zeros."""
        return os.pread(self.file, end - start, start).ljust(end - start, b"\0")

    def read_header(self) -> tuple[int, ...]:
        return struct.unpack(f"<{HEADER}q", self.read_bytes(0, 8 * HEADER))

    def count_records(self) -> int:
        """The number of records begun so far; of a linear log, of those for which there is room."""
        header = self.read_header()
        limit = min(header[LIMIT], self.format.capacity)
        return max(0, header[BEGUN] if self.format.ring else min(header[BEGUN], limit))

    def read_records(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Those of these records that are whole, by number."""
        format, size, mark = self.format, self.format.record.size, self.format.mark
        end = self.count_records()
        places = {number: format.place_of(number) for number in numbers if 0 <= number < end}
        start, end = min(places.values(), default=0), max(places.values(), default=-size) + size
        marked, content = self.read_bytes(start, end), self.read_bytes(start, end)
        oldest = self.read_header()[BEGUN] - format.capacity if format.ring else 0
        found = {}
        for number, place in places.items():
            at = place - start
            (before,), (after,) = mark.unpack_from(marked, at), mark.unpack_from(content, at)
            is_whole = before == after == number + 1 if format.ring else before and after
            if is_whole and number >= oldest:
                found[number] = content[at : at + size]
        return found

    def read_words(self, count: int | None = None) -> bytes:
        """The owner's words, or so many of them."""
        count = self.format.words if count is None else min(max(count, 0), self.format.words)
        return self.read_bytes(self.format.words_at, self.format.words_at + 8 * count)

    def read_text(self) -> bytes:
        used = min(max(self.read_header()[USED], 0), self.format.text)
        return self.read_bytes(self.format.text_at, self.format.text_at + used)


def read_lines(text: bytes) -> Iterator[tuple[Any, Any]]:
    """The subject and the thing of each complete line. Raises `ValueError` for one that no log
    has."""
    for line in text.split(b"\n")[:-1]:
        subject, thing = expect_list(parse_json(line))
        yield subject, thing
