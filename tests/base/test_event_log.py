"""The event log: what it promises of a process that is killed, of a reader meanwhile, and when it
is full."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from processes import ENOUGH

from playground.base.event_log import (
    BEGUN,
    LIMIT,
    NONE,
    EventLog,
    Format,
    LogReader,
    Table,
    map_file,
    read_lines,
)

RECORD = struct.Struct("<6qq")
MARK = struct.Struct("<48xq")
LINEAR = Format(title=b"PLAYTEST", record=RECORD, mark=MARK, capacity=10, words=4, text=2**12)
RING = replace(LINEAR, ring=True)


class Log(EventLog):
    """A log whose records are six equal numbers."""

    def record(self, value: int) -> int:
        number = self.take_number()
        place = self.format.place_of(number)
        RECORD.pack_into(self.memory, place, *[value] * 6, number + 1)
        return number


def new_log(folder: Path, format: Format) -> Log:
    return Log(format, map_file(folder / "log", format.size))


def open_reader(folder: Path, format: Format = LINEAR) -> LogReader:
    return LogReader(os.open(folder / "log", os.O_RDONLY), format)


def read_values(reader: LogReader, numbers: Iterable[int] | None = None) -> dict[int, int]:
    """The value of each whole record, by number."""
    found = {}
    begun = range(reader.read_header()[BEGUN])
    for number, record in reader.read_records(begun if numbers is None else numbers).items():
        *values, _ = RECORD.unpack(record)
        assert len({*values}) == 1, "the record is torn"
        found[number] = values[0]
    return found


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
THINGS = TEXT | st.tuples(st.integers(), TEXT) | st.integers()


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)), things=st.lists(THINGS, max_size=20))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("ring", [False, True])
def test_records_and_things_come_back(ring: bool, values: list[int], things: list[object]) -> None:
    format = replace(LINEAR, ring=ring, text=2**16)
    with tempfile.TemporaryDirectory() as name:
        log, reader = new_log(Path(name), format), open_reader(Path(name), format)
        assert [log.record(value) for value in values][:10] == [*range(len(values))][:10]
        kept = range(len(values))[-10:] if ring else range(len(values))[:10]
        assert read_values(reader) == {number: values[number] for number in kept}
        table = Table(log, "thing")
        numbers = [table[thing] for thing in things]
        there = [found for subject, found in read_lines(reader.read_text()) if subject == "thing"]
    plain = [[*thing] if isinstance(thing, tuple) else thing for thing in things]
    assert [there[number] for number in numbers] == plain
    assert len(there) == len({*things})


def test_a_ring_without_room_for_a_thing_goes_on(tmp_path: Path) -> None:
    log = new_log(tmp_path, RING)
    table = Table(log, "thing")
    assert (table["x" * RING.text], table["short"], table["short"]) == (NONE, 0, 0)
    assert [log.record(value) for value in range(25)] == [*range(25)]
    assert read_values(open_reader(tmp_path, RING)) == {n: n for n in range(15, 25)}


def test_a_linear_log_stops_where_it_is_full(tmp_path: Path) -> None:
    log = new_log(tmp_path, LINEAR)
    assert [log.record(value) for value in range(12)] == [*range(10), 10, 10]
    reader = open_reader(tmp_path)
    assert read_values(reader) == {number: number for number in range(10)}
    assert reader.read_header()[BEGUN] == 12


def test_a_linear_log_without_room_for_a_thing_takes_no_more_records(tmp_path: Path) -> None:
    """Which might refer to it."""
    log = new_log(tmp_path, LINEAR)
    log.record(7)
    assert Table(log, "thing")["x" * LINEAR.text] == NONE
    assert log.record(8) == LINEAR.capacity
    header = open_reader(tmp_path).read_header()
    assert (header[BEGUN], header[LIMIT]) == (2, 1)
    assert read_values(open_reader(tmp_path), [0]) == {0: 7}


@contextlib.contextmanager
def writer(folder: Path, policy: str) -> Iterator[None]:
    """A process that writes to a log there, which is there, until it is killed at the end of this
    block."""
    begun = multiprocessing.Event()
    process = multiprocessing.get_context("fork").Process(
        target=write, args=(folder, policy, begun)
    )
    process.start()
    assert begun.wait(ENOUGH)
    try:
        yield
    finally:
        process.kill()
        process.join()


def write(folder: Path, policy: str, begun: Event) -> None:
    ring = policy == "ring"
    format = replace(RING if ring else LINEAR, capacity=50 if ring else 10**5, text=2**18)
    log = new_log(folder, format)
    table = Table(log, "thing")
    begun.set()
    for value in count():
        log.record(table[f"thing {value % 1000}"])
        if value % 50 == 0 and not ring:
            time.sleep(1e-4)


@pytest.mark.parametrize("policy", ["ring", "linear"])
def test_a_reader_meanwhile_and_after_a_kill_finds_whole_records_and_their_things(
    policy: str, tmp_path: Path
) -> None:
    draw = random.Random(policy)
    for _ in range(3):
        with writer(tmp_path, policy):
            reader = open_reader(tmp_path, RING if policy == "ring" else LINEAR)
            for _ in range(20):
                check_prefix(reader, policy)
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
        found = check_prefix(reader, policy)
        begun = reader.read_header()[BEGUN]
        # of those that were begun the last one may not be whole
        assert begun > 0
        assert min(begun, 50) - 1 <= found <= 50


def check_prefix(reader: LogReader, policy: str) -> int:
    """The number of whole records among the latest 50: all are right, and name things that are
    there."""
    begun = reader.read_header()[BEGUN]
    values = read_values(reader, range(max(0, begun - 50), begun))
    things = [thing for _, thing in read_lines(reader.read_text())]
    assert {number: number % 1000 for number in values} == values
    assert all(things[value] == f"thing {value}" for value in values.values())
    if policy == "linear":  # from a ring those are missing that are overwritten meanwhile
        assert len(values) >= min(begun, 50) - 1
    return len(values)


def test_threads_take_numbers_of_their_own(tmp_path: Path) -> None:
    log = new_log(tmp_path, replace(LINEAR, capacity=4000, text=2**20))
    table = Table(log, "thing")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [
        threading.Thread(target=lambda: [log.record(table[value]) for value in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    reader = open_reader(tmp_path)
    assert sorted(read_values(reader).values()) == sorted([*range(1000)] * 4)
    assert [thing for _, thing in read_lines(reader.read_text())] == [*table]


def test_what_is_written_after_letting_go_is_lost(tmp_path: Path) -> None:
    log = new_log(tmp_path, LINEAR)
    log.record(1)
    log.let_go()
    assert (log.record(2), Table(log, "thing")["new"]) == (LINEAR.capacity, NONE)
    reader = open_reader(tmp_path)
    assert (read_values(reader), reader.read_text()) == ({0: 1}, b"")


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("dear diary")
    (tmp_path / "log").symlink_to(tmp_path / "diary")
    new_log(tmp_path, LINEAR).record(1)
    assert (tmp_path / "diary").read_text() == "dear diary"
    assert not (tmp_path / "log").is_symlink()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PLAYBOX0", "no log, or one of another version"),
        (struct.pack("<8s3q", LINEAR.title, 10, 4, 2**40), "shorter than it says"),
        (struct.pack("<8s3q", LINEAR.title, -1, 4, 0), "shorter than it says"),
    ],
)
def test_damage_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content.ljust(LINEAR.size, b"\0"))
    with pytest.raises(ValueError, match=words):
        open_reader(tmp_path)


def test_a_log_that_has_not_begun_or_is_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    reader = open_reader(tmp_path)
    assert (read_values(reader), reader.read_text(), reader.read_words()) == ({}, b"", b"")
    log = new_log(tmp_path, LINEAR)
    for value in range(10):
        log.record(value)
    reader = open_reader(tmp_path)
    os.truncate(tmp_path / "log", LINEAR.place_of(3))
    assert read_values(reader) == {0: 0, 1: 1, 2: 2}


def test_a_log_of_this_process_s_own_memory_needs_no_file() -> None:
    log = Log(LINEAR, mmap.mmap(-1, LINEAR.size))
    assert (log.record(1), Table(log, "thing")["new"]) == (0, 0)
