"""The format of a recording on the disk: a folder with a log per rank, or one zip file with three
members per rank. Does not import torch.

`rank-R.log` is an `EventLog` whose records are events and whose words are the contents of small
tensors, as float64. Its text is the rank's description, and the things that records refer to by
number. In the zip file these are `rank-R.events`, after a header, `rank-R.values` and
`rank-R.tables`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from playground.base.errors import UsageError
from playground.base.event_log import BEGUN, OWN, Format, LogReader
from playground.base.files import replacing
from playground.explain.replay.record.recording import BACKGROUND, MAIN


class EventRecord(NamedTuple):
    """An event. -1 means "none"."""

    start: int
    end: int
    """Nanoseconds of the host's clock; 0 if it has not ended."""
    nbytes: int
    offset: int
    values: int
    """`position * SPAN + count`"""
    parent: int
    peer: int
    message: int
    tag: int
    wait: int
    """The number of the event that waited for this one."""
    source: int
    shape: int
    name: int
    group: int
    lane: int
    kind: int
    """Its place in `KINDS`, from 1 on."""


CODES = 5 * "q" + 9 * "i" + 2 * "B"
"""The types of the fields of an `EventRecord`, as `struct` names them."""


def offset_of(field: str) -> int:
    """The offset of a field of an `EventRecord` in its binary format, in bytes."""
    return struct.calcsize("<" + CODES[: EventRecord._fields.index(field)])


RECORD = struct.Struct(f"<{CODES}2x")
"""The binary format of an `EventRecord`. The kind is its mark: a record without one is
incomplete."""
KIND = struct.Struct(f"<{offset_of('kind')}xB")
"""The kind alone."""

MAX_VALUES = 64
"""Elements of a tensor whose values are recorded; of larger ones only the shape is."""
SPAN = 128
"""More than `MAX_VALUES`: see `EventRecord.values`."""

LOG = Format(title=b"PLAYREC2", record=RECORD, mark=KIND, capacity=2**18, words=2**20)
"""Events, and values of small tensors, take 21 and 8 MB on the disk until the run is over; the text
takes 4 MB."""
VALUES_USED = OWN
"""Place of the number of values in the log's header, in units of 8 bytes."""

HEADER = struct.Struct("<8s3q48x")
"""MAGIC, number of events, dropped ones, number of values: the beginning of `rank-R.events`."""
MAGIC = b"PLAYREC1"

LANES = (MAIN, BACKGROUND)
LANE_CODES = {lane: code for code, lane in enumerate(LANES)}

EVENTS, VALUES, TABLES = "events", "values", "tables"
"""Kinds of the members of the zip file."""
WHOLE = "log"
"""The kind of the file in the folder that holds all three."""
RUN = "run.json"
"""A description of the run."""
TEXT = "text/"
"""Prefix of the names of members that are files of the program."""
TABLES_FILE = re.compile(rf"rank-(\d{{1,9}})\.{TABLES}")
"""The name of the member of the zip file with a rank's tables."""
LOG_FILE = re.compile(rf"rank-(\d{{1,9}})\.{WHOLE}")
LOGS = f"rank-*.{WHOLE}"
"""The name of a rank's log in the folder, and a pattern for `glob`."""
MAX_RANKS = 4096
"""Number of ranks in a recording."""
NAME = "name"
SHAPE = "shape"
GROUP = "group"
SOURCE = "source"
START = "start"
WORLD = "world"
ENDED = "end"
"""Subjects of a line of the tables: its first element."""


def file_name(rank: int, kind: str) -> str:
    """The name of a rank's file of this kind, in the folder or in the zip file."""
    return f"rank-{rank}.{kind}"


FASTEST = 1
"""The zlib level: records are so alike that slower ones gain little."""
MAX_RATIO, ALLOWANCE = 100, 2**24
"""A recording is at most `MAX_RATIO` times as large as it is on the disk, and `ALLOWANCE` bytes:
others are up to 30 times as large."""
Files = Mapping[str, bytes]
"""The contents of a zip file or a folder, by name."""


def check_expansion(expanded: int, stored: int) -> None:
    """Raise `ValueError` if what takes `stored` bytes on the disk is too large for a recording when
    it is read."""
    if expanded > MAX_RATIO * stored + ALLOWANCE:
        raise ValueError(f"it expands to more than {MAX_RATIO} times its size")


def read_folder(folder: Path) -> Files:
    """Read a folder that ranks have written to; of several recordings in it, the last one. Raises
    what `read_zip` raises."""
    logs = sorted(file for depth in range(3) for file in folder.glob(f"{'*/' * depth}{LOGS}"))
    if not logs:
        raise UsageError(
            f"{folder} is a folder without a recording: name a file that --see has written"
        )
    folder = logs[-1].parent
    names = (file for file in folder.iterdir() if file.name == RUN or LOG_FILE.fullmatch(file.name))
    files = {file: file.stat() for file in names if file.is_file()}
    check_expansion(
        sum(each.st_size for each in files.values()),
        sum(512 * each.st_blocks for each in files.values()),
    )
    content: dict[str, bytes] = {}
    for file in sorted(files):
        if log := LOG_FILE.fullmatch(file.name):
            content |= read_log(file, int(log[1]))
        else:
            content[RUN] = file.read_bytes()
    return content


def read_log(file: Path, rank: int) -> Files:
    """What a rank has written, as members of the zip file."""
    log = LogReader(os.open(file, os.O_RDONLY | os.O_CLOEXEC), LOG)
    header, count = log.read_header(), log.count_records()
    dropped, values_used = max(0, header[BEGUN] - count), header[VALUES_USED]
    records = log.read_records(range(count))
    incomplete = bytes(RECORD.size)
    events = [records.get(number, incomplete) for number in range(count)]
    members = {
        EVENTS: b"".join((HEADER.pack(MAGIC, count, dropped, values_used), *events)),
        VALUES: log.read_words(values_used),
        TABLES: log.read_text(),
    }
    return {file_name(rank, kind): content for kind, content in members.items()}


def read_zip(path: Path) -> Files:
    """Read a zip file. Raises `UsageError` if it is no recording, `ValueError` or `zlib.error` if
    it is damaged or far larger than it is on the disk, and `OSError` if it cannot be read."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is neither a file nor a folder: make a recording with --see FILE.playground"
        )
    try:
        with ZipFile(path) as packed:
            members = packed.infolist()
            check_expansion(sum(each.file_size for each in members), path.stat().st_size)
            return {each.filename: read_member(packed, each) for each in members}
    except (BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise UsageError(
            f"{path} is not a recording ({error}): make one with --see FILE.playground"
        ) from None


def read_member(packed: ZipFile, member: ZipInfo) -> bytes:
    """The content of a member. Raises `BadZipFile` if it is not as long as it says it is."""
    # others cannot be read up to a limit
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise BadZipFile("compressed in another way")
    with packed.open(member) as opened:
        return opened.read(member.file_size)


def write_zip(path: Path, files: Files) -> None:
    """Write a zip file, atomically. Raises `OSError`."""
    with (
        replacing(path, f".{path.name}.unfinished") as descriptor,
        open(descriptor, "wb", closefd=False) as unfinished,
        ZipFile(unfinished, "w", ZIP_DEFLATED, compresslevel=FASTEST) as packed,
    ):
        for name, content in files.items():
            packed.writestr(name, content)
