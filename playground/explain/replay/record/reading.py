"""Reads a recording from what ranks have written: from their folder, or from the zip file that was
made of it. What no rank writes is refused. Does not import torch."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from playground.base.errors import UsageError
from playground.base.event_log import NONE, read_lines
from playground.base.untrusted import (
    expect_dict,
    expect_float,
    expect_int,
    expect_list,
    expect_text,
    parse_json,
)
from playground.explain.replay.record import layout
from playground.explain.replay.record.layout import (
    HEADER,
    RECORD,
    TEXT,
    EventRecord,
    Files,
    file_name,
)
from playground.explain.replay.record.recording import (
    KINDS,
    SCHEMA,
    Event,
    RankRecording,
    Recording,
    SourceLine,
    Standstill,
)

NANOSECONDS = 1e9
"""In a second."""
YEAR_10000 = 253_402_300_800
"""Seconds since 1970."""
MAX_BYTES = 2**50
"""Maximum size of a tensor."""
MAX_DEPTH = 100
"""Maximum number of events that lie in each other: pictures have a row for each, and every analysis
passes them."""


Tables = dict[str, list[Any]]
"""A rank's description of itself, and the things that its records refer to: what its lines hold, by
their subject."""


def read_start(about: object) -> Mapping[str, Any]:
    """A rank's description of itself: its device; and the time, in seconds since 1970, with the
    same moment on its clock, in nanoseconds."""
    told = expect_dict(about)
    time = expect_float(told["time"], 0, YEAR_10000 - 1)
    return {"device": expect_text(told["device"]), "time": time, "clock": expect_int(told["clock"])}


def read_world(about: object) -> Mapping[str, str]:
    """The backend of the world that a rank's program has formed, and the rank's device in it."""
    told = expect_dict(about)
    return {each: expect_text(told[each]) for each in ("backend", "device")}


def read_source(line: object) -> tuple[SourceLine, str]:
    """A line of the program, and the path of its file."""
    file, number, function, path = expect_list(line)
    return SourceLine(expect_text(file), expect_int(number, 0), expect_text(function)), str(path)


READERS: dict[str, Callable[..., Any]] = {
    layout.NAME: expect_text,
    layout.SHAPE: lambda shape: tuple(expect_int(each, 0) for each in expect_list(shape)),
    layout.GROUP: lambda group: tuple(
        expect_int(each, 0, layout.MAX_RANKS - 1) for each in expect_list(group)
    ),
    layout.SOURCE: read_source,
    layout.START: read_start,
    layout.WORLD: read_world,
    layout.ENDED: expect_int,
}
"""Readers of the rest of a line, by its subject."""


def read_tables(content: bytes) -> Tables:
    """Read the complete lines. Raises `ValueError`, `KeyError` or `TypeError` for what no rank
    writes."""
    tables: Tables = {subject: [] for subject in READERS}
    for subject, thing in read_lines(content):
        if subject in READERS:
            tables[subject].append(READERS[subject](thing))
    return tables


def read_events(
    rank: int,
    tables: Tables,
    sources: Mapping[SourceLine, int],
    began: int,
    records: Sequence[EventRecord],
    values: bytes,
) -> Iterator[Event]:
    """The complete events of a rank, in the order of their starts.

    `sources` has their indices in the whole recording; times are since `began`, in nanoseconds.
    Raises `ValueError` or `IndexError` for what no rank writes.
    """
    found = [(place, record) for place, record in enumerate(records) if record.kind]
    check_records(found)
    found.sort(key=lambda each: (each[1].start, each[0]))
    numbers = {place: number for number, (place, _) in enumerate(found)}
    awaits, left = defaultdict(list), len(values) // 8
    for place, record in found:
        awaits[record.wait].append(numbers[place])
    for number, (place, record) in enumerate(found):
        its_values = read_values(record.values, values)
        if (left := left - len(its_values or ())) < 0:  # each is written for one event
            raise ValueError("its events have more values than there are")
        yield Event(
            number=number,
            rank=rank,
            kind=KINDS[record.kind - 1],
            name=tables[layout.NAME][record.name],
            start=(record.start - began) / NANOSECONDS,
            end=(max(record.start, record.end) - began) / NANOSECONDS if record.end else inf,
            lane=layout.LANES[record.lane],
            parent=numbers.get(record.parent),
            peer=optional(record.peer),
            nbytes=record.nbytes,
            shape=tables[layout.SHAPE][record.shape],
            group=tables[layout.GROUP][record.group],
            message=optional(record.message),
            tag=record.tag,
            offset=optional(record.offset),
            awaits=tuple(awaits.get(place, ())),
            source=None
            if record.source == NONE
            else sources[tables[layout.SOURCE][record.source][0]],
            values=its_values,
        )


def check_records(records: Sequence[tuple[int, EventRecord]]) -> None:
    """Raise `ValueError` unless each record, given with its place, has its parent before it, and
    possible numbers."""
    depths = {NONE: 0}
    """In how many events each lies, itself included."""
    for place, record in records:
        if record.parent != NONE and not 0 <= record.parent < place:
            raise ValueError(
                f"event {place} lies in event {record.parent}, which does not come before it"
            )
        least = min(record.peer, record.message, record.offset, record.source)
        if least < NONE or record.shape < 0 or not 0 <= record.nbytes <= MAX_BYTES:
            raise ValueError(f"event {place} has numbers that no event has")
        depths[place] = depths.get(record.parent, 0) + 1
        if depths[place] > MAX_DEPTH:
            raise ValueError(f"event {place} lies in more than {MAX_DEPTH - 1} others")


def read_values(span: int, values: bytes) -> tuple[float, ...] | None:
    """The values of an event; None if they were not recorded, or are missing."""
    if span == NONE:
        return None
    first, count = divmod(span, layout.SPAN)
    content = memoryview(values)[8 * first : 8 * (first + count)]
    return tuple(content.cast("d")) if len(content) == 8 * count else None


def optional(number: int) -> int | None:
    return None if number == NONE else number


def read_recording(path: str | Path) -> Recording:
    """Read a recording from a file, or from a folder that ranks have written to.

    Of ranks that were killed, the complete events are read. Raises `UsageError` if it cannot be
    read, is not a recording, is damaged or has another version.
    """
    try:
        with refused_if_damaged(path):
            place = Path(path)
            files = layout.read_folder(place) if place.is_dir() else layout.read_zip(place)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return merge(files, path)


@contextlib.contextmanager
def refused_if_damaged(name: str | Path) -> Iterator[None]:
    """Raise `UsageError` for errors in this block that a damaged recording of this name causes."""
    try:
        yield
    except (ValueError, LookupError, TypeError, struct.error, zlib.error) as error:
        raise UsageError(f"{name} is a damaged recording ({error}): record the run again") from None


def merge(files: Files, name: str | Path = "this") -> Recording:
    """The recording in a file or folder of this name. Raises `UsageError` as `read_recording`."""
    with refused_if_damaged(name):
        run = expect_dict(parse_json(files.get(layout.RUN, b"{}")))
        if (schema := run.get("schema", SCHEMA)) != SCHEMA:
            raise UsageError(
                f"{name} is of version {schema}, and this playground reads {SCHEMA}: record the "
                "run again"
            )
        names = filter(None, map(layout.TABLES_FILE.fullmatch, files))
        present = max((int(name[1]) for name in names), default=-1)
        size = expect_int(run.get("size", present + 1), 0, layout.MAX_RANKS)
        tables = (files.get(file_name(rank, layout.TABLES), b"") for rank in range(size))
        ranks = [*map(read_tables, tables)]
        starts = [rank[layout.START][-1] for rank in ranks if rank[layout.START]]
        if not starts:
            raise UsageError(
                "the recording ends before its first rank begins: record the run again"
            )
        began = min(start["clock"] for start in starts)
        formed = (world for rank in ranks for world in rank[layout.WORLD][-1:])
        sources = dict.fromkeys(source for rank in ranks for source, _ in rank[layout.SOURCE])
        numbers = {source: number for number, source in enumerate(sources)}
        versions = expect_dict(run.get("versions", {}))
        texts = {each: text for each, text in files.items() if each.startswith(TEXT)}
        return Recording(
            command=tuple(map(expect_text, expect_list(run.get("command", [])))),
            backend=next(formed, {"backend": expect_text(run.get("backend", ""))})["backend"],
            versions={expect_text(name): expect_text(each) for name, each in versions.items()},
            began=starts[0]["time"],
            ranks=tuple(
                read_rank(rank, tables, numbers, began, files) for rank, tables in enumerate(ranks)
            ),
            sources=tuple(sources),
            texts={
                each.removeprefix(TEXT): text.decode(errors="replace")
                for each, text in texts.items()
            },
            standstill=read_standstill(run["standstill"]) if "standstill" in run else None,
            ended=expect_text(run.get("ended", ""), lines=True),
        )


def read_standstill(about: object) -> Standstill:
    """The diagnosis that `note_failure` has written."""
    sentence, cure, waits = expect_list(about)
    pairs = tuple(
        (expect_int(rank, 0), tuple(expect_int(other, 0) for other in expect_list(others)))
        for rank, others in map(expect_list, expect_list(waits))
    )
    return Standstill(expect_text(sentence), expect_text(cure), pairs)


def read_rank(
    rank: int, tables: Tables, sources: Mapping[SourceLine, int], began: int, files: Files
) -> RankRecording:
    """One rank's recording, with times from `began` on, in nanoseconds of the host's clock. Raises
    `UsageError`, and errors of damaged recordings, for what no rank writes."""
    if not tables[layout.START]:
        return RankRecording(rank=rank, device="", events=(), is_cut_off=True)
    content, values = (
        files.get(file_name(rank, kind), b"") for kind in (layout.EVENTS, layout.VALUES)
    )
    if len(content) < HEADER.size:
        content = HEADER.pack(layout.MAGIC, 0, 0, 0)
    magic, capacity, dropped, _ = HEADER.unpack_from(content)
    if magic != layout.MAGIC:
        raise UsageError(f"the events of rank {rank} are none: record the run again")
    whole = content[HEADER.size : len(content) // RECORD.size * RECORD.size]
    records = [EventRecord._make(fields) for fields in RECORD.iter_unpack(whole)]
    return RankRecording(
        rank=rank,
        device=(tables[layout.WORLD] or tables[layout.START])[-1]["device"],
        events=tuple(
            read_events(rank, tables, sources, began, records[: expect_int(capacity, 0)], values)
        ),
        dropped=expect_int(dropped, 0),
        is_cut_off=not tables[layout.ENDED],
    )
