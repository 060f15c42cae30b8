"""What a rank has written, read back. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_float, expect_int, expect_list, expect_text, parse_json
from playground.see.record import tables
from playground.see.record.clocks import Clock, ClockSample
from playground.see.record.layout import HEADER, LANES, MAGIC, MAX_RANKS, NONE, RECORD, SPAN, Record
from playground.see.record.recording import KINDS, Event, Source

INFINITE = float("inf")
SECOND = 1e9
"""In nanoseconds."""
YEAR_10000 = 253_402_300_800
"""In seconds since 1970."""
MAX_BYTES = 2**50
"""Of a tensor."""
MAX_DEPTH = 100
"""Events that lie in each other."""


@dataclass(frozen=True, kw_only=True)
class RankAbout:
    """What a rank says of itself when its recording begins."""

    time: float
    """Seconds since 1970."""
    clock: int
    """The same moment on the rank's own clock, in nanoseconds."""
    host: str
    """The host's name."""
    host_id: str
    """What tells it from others, whatever they are called."""
    device: str
    cores: int


@dataclass
class RankTables:
    """What a rank said of itself, and what its records refer to."""

    about: RankAbout | None = None
    """None if it never began."""
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    sources: list[tuple[Source, str]] = field(default_factory=list)
    """Each with the path of its file."""
    samples: list[ClockSample] = field(default_factory=list)
    ended: int | None = None
    """When it told that it ends, on its own clock."""


def read_tables(content: bytes) -> RankTables:
    """As much of them as is whole. Raises `ValueError`, `KeyError` or `TypeError` for what no rank writes."""
    read = RankTables()
    for line in content.split(b"\n")[:-1]:
        about, value, *more = expect_list(parse_json(line))
        if about == tables.NAME:
            read.names.append(expect_text(value))
        elif about == tables.SHAPE:
            read.shapes.append(tuple(expect_int(each, 0) for each in expect_list(value)))
        elif about == tables.GROUP:
            read.groups.append(tuple(expect_int(each, 0, MAX_RANKS - 1) for each in expect_list(value)))
        elif about == tables.SOURCE:
            file, number, function, path = expect_list(value)
            source = Source(expect_text(file), expect_int(number, 0), expect_text(function))
            read.sources.append((source, str(path)))
        elif about == tables.CLOCK:
            read.samples.append(ClockSample(*map(expect_int, (value, *more))))
        elif about == tables.START:
            read.about = read_about(expect_dict(value))
        elif about == tables.END:
            read.ended = expect_int(value)
    return read


def read_about(value: Mapping[str, object]) -> RankAbout:
    return RankAbout(
        time=expect_float(value["time"], 0, YEAR_10000 - 1), clock=expect_int(value["clock"]),
        host=expect_text(value["host"]), host_id=expect_text(value["host_id"]), device=expect_text(value["device"]),
        cores=expect_int(value["cores"], 1),
    )  # fmt: skip


@dataclass(frozen=True)
class EventReader:
    """Makes events of a rank's records."""

    rank: int
    tables: RankTables
    sources: Sequence[int]
    """The numbers that its sources have in the whole recording."""
    clock: Clock
    began: float
    """When the recording began, in nanoseconds on rank 0's clock."""

    def seconds(self, time: int) -> float:
        """Since the recording began, at a time on the rank's own clock."""
        return (self.clock.to_rank_0(time) - self.began) / SECOND

    def read(self, content: bytes, values: bytes) -> tuple[list[Event], int]:
        """The events that are whole, in the order in which they began, and the number of those that were dropped.

        Raises `UsageError`, `ValueError`, `IndexError` or `struct.error` for what no rank writes.
        """
        if len(content) < HEADER.size:
            return [], 0
        magic, capacity, dropped, _ = HEADER.unpack_from(content)
        if magic != MAGIC:
            raise UsageError(f"the events of rank {self.rank} are none: record the run anew")
        end = min(HEADER.size + capacity * RECORD.size, len(content) // RECORD.size * RECORD.size)
        return list(self.events(content[HEADER.size : end], values)), expect_int(dropped, 0)

    def last_start(self, content: bytes) -> int:
        """When the last event began, on the rank's own clock; 0 if there is none."""
        whole = content[HEADER.size : len(content) // RECORD.size * RECORD.size]
        return max((Record._make(fields).start for fields in RECORD.iter_unpack(whole)), default=0)

    def events(self, records: bytes, values: bytes) -> Iterator[Event]:
        all_records = map(Record._make, RECORD.iter_unpack(records))
        found = [(place, record) for place, record in enumerate(all_records) if record.kind]
        check_records(found)
        found.sort(key=lambda each: (each[1].start, each[0]))
        numbers = {place: number for number, (place, _) in enumerate(found)}
        awaits = defaultdict(list)
        for place, record in found:
            awaits[record.wait].append(numbers[place])
        for number, (place, record) in enumerate(found):
            yield self.to_event(number, numbers, record, tuple(awaits.get(place, ())), values)

    def to_event(
        self, number: int, numbers: Mapping[int, int], record: Record, awaits: tuple[int, ...], values: bytes
    ) -> Event:
        """A record as an event. `numbers` are those of events by their places in the file, to which records refer."""
        return Event(
            number=number, rank=self.rank, kind=KINDS[record.kind - 1], name=self.tables.names[record.name],
            start=self.seconds(record.start),
            end=self.seconds(max(record.start, record.end)) if record.end else INFINITE,
            lane=LANES[record.lane], parent=numbers.get(record.parent), peer=optional(record.peer),
            nbytes=record.nbytes, shape=self.tables.shapes[record.shape], group=self.tables.groups[record.group],
            message=optional(record.message), tag=record.tag, offset=optional(record.offset), awaits=awaits,
            source=None if record.source == NONE else self.sources[record.source],
            values=read_values(record.values, values),
        )  # fmt: skip


def check_records(records: Sequence[tuple[int, Record]]) -> None:
    """Raise `ValueError` unless each, given with its place, lies in one before it, and its numbers are such as can
    be."""
    depths: dict[int, int] = {}
    for place, record in records:
        depth = 0
        if record.parent != NONE:
            if not 0 <= record.parent < place:
                raise ValueError(f"event {place} lies in event {record.parent}, which does not come before it")
            depth = depths.get(record.parent, 0) + 1
            if depth > MAX_DEPTH:
                raise ValueError(f"event {place} lies in more than {MAX_DEPTH} others")
        depths[place] = depth
        least = min(record.peer, record.message, record.offset, record.source)
        if least < NONE or record.shape < 0 or not 0 <= record.nbytes <= MAX_BYTES:
            raise ValueError(f"event {place} has numbers that no event has")


def read_values(span: int, values: bytes) -> tuple[float, ...] | None:
    """What an event's tensor held; None if that was not recorded, or is missing."""
    if span == NONE:
        return None
    first, count = divmod(span, SPAN)
    content = memoryview(values)[8 * first : 8 * (first + count)]
    return tuple(content.cast("d")) if len(content) == 8 * count else None


def optional(number: int) -> int | None:
    return None if number == NONE else number
