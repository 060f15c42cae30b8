"""The format of a recording on the disk: a folder with three files per rank, or these in one zip
file. Does not import torch.

`rank-R.events` is mapped into the rank's memory: a header and, for each event, a record of fixed
size. `rank-R.values` is mapped too: the contents of small tensors, as float64. `rank-R.tables` is
written line by line, as JSON: the rank's description, and the things that records refer to by
number. All of it is passed to the system as soon as it is written, and so outlives the rank,
however that ends.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from playground.runtime.errors import UsageError
from playground.runtime.files import replacing
from playground.trace.record import BACKGROUND, MAIN

RECORD = struct.Struct("<5q9i2B2x")
"""The binary format of an `EventRecord`. The kind is written last: a record without one is
incomplete."""


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


MAX_VALUES = 64
"""Elements of a tensor whose values are recorded; of larger ones only the shape is."""
SPAN = 128
"""More than `MAX_VALUES`: see `EventRecord.values`."""

HEADER = struct.Struct("<8s3q48x")
"""MAGIC, capacity, dropped, number of values: as long as a record, and before them."""
MAGIC = b"PLAYREC1"
NONE = -1

LANES = (MAIN, BACKGROUND)
LANE_CODES = {lane: code for code, lane in enumerate(LANES)}

EVENTS, VALUES, TABLES = "events", "values", "tables"
FILES = (TABLES, EVENTS, VALUES)
"""The files of each rank."""
RUN = "run.json"
"""A description of the run."""
RANK_FILE = re.compile(rf"rank-(\d{{1,9}})\.({'|'.join(FILES)})")
MAX_RANKS = 4096
"""Number of ranks in a recording."""
NAME = "name"
SHAPE = "shape"
GROUP = "group"
SOURCE = "source"
START = "start"
ENDED = "end"
"""Subjects of a line of the tables: its first element."""


def place_of(number: int) -> int:
    """The offset of a record in its file, in bytes."""
    return HEADER.size + RECORD.size * number


def file_name(rank: int, kind: str) -> str:
    return f"rank-{rank}.{kind}"


FASTEST = 1
"""The zlib level: records are so alike that slower ones gain little."""
MAX_RATIO, ALLOWANCE = 100, 2**24
"""A recording is at most `MAX_RATIO` times as large as it is on the disk, and `ALLOWANCE` bytes:
others are up to 30 times as large."""
Files = Mapping[str, bytes]
"""The contents of a zip file or a folder, by name."""


def read_files(path: Path) -> Files:
    """Read a zip file, or the folder that ranks have written to. Raises `UsageError` if it is no
    recording, `ValueError` or `zlib.error` if it is damaged or far larger than it is on the disk,
    and `OSError` if it cannot be read."""
    return read_folder(path) if path.is_dir() else read_zip(path)


def check_expansion(expanded: int, stored: int) -> None:
    """Raise `ValueError` if what takes `stored` bytes on the disk is too large for a recording when
    it is read."""
    if expanded > MAX_RATIO * stored + ALLOWANCE:
        raise ValueError(f"it expands to more than {MAX_RATIO} times its size")


def read_folder(folder: Path) -> Files:
    """Read a folder; of several recordings in it, the last one."""
    tables = sorted(file for depth in range(3) for file in folder.glob(f"{'*/' * depth}*.{TABLES}"))
    if not tables:
        raise UsageError(
            f"{folder} is a folder without a recording: name a file that --see has written"
        )
    folder = tables[-1].parent
    names = (
        file for file in folder.iterdir() if file.name == RUN or RANK_FILE.fullmatch(file.name)
    )
    files = {file.name: file.stat() for file in names if file.is_file()}
    check_expansion(
        sum(each.st_size for each in files.values()),
        sum(512 * each.st_blocks for each in files.values()),
    )
    ranks = {int(name[1]) for name in map(RANK_FILE.fullmatch, files) if name}
    run = {RUN: (folder / RUN).read_bytes()} if RUN in files else {}
    return run | {
        name: content
        for rank in ranks
        for name, content in read_rank_files(folder, rank, files).items()
    }


def read_rank_files(folder: Path, rank: int, there: Collection[str]) -> Files:
    """The contents of a rank's files, as far as they are `there`, by name, without the unused room
    at their ends."""
    files = {
        kind: (folder / name).read_bytes()
        for kind in FILES
        if (name := file_name(rank, kind)) in there
    }
    events = files.get(EVENTS, b"").rstrip(b"\0")
    _, capacity, _, values_used = read_header(events)
    events = events[: place_of(max(0, capacity))]
    files[EVENTS] = events + bytes(-len(events) % RECORD.size)
    files[VALUES] = files.get(VALUES, b"")[: 8 * max(0, values_used)]
    return {file_name(rank, kind): content for kind, content in files.items()}


def read_zip(path: Path) -> Files:
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


def read_header(events: bytes) -> tuple[bytes, int, int, int]:
    """The header of a rank's events; one of none if it is missing."""
    return HEADER.unpack_from(events) if len(events) >= HEADER.size else (MAGIC, 0, 0, 0)
