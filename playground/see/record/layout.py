"""The format of a recording on the disk: a folder with three files per rank, or one file. Does not import torch.

`rank-R.events` is mapped into the rank's memory: a header and, for each event, a record of fixed size. `rank-R.values`
is mapped too: the contents of small tensors, as float64. `rank-R.tables` is written line by line, as JSON: the rank's
description, and the things that records refer to by number. All of it is passed to the system as soon as it is written,
and so outlives the rank, however that ends.

The single file holds the files of such a folder. Its first line has its type and version, in plain text; the rest is
one zlib stream: for each member a line of JSON with its name and length, then its bytes. A file whose end is missing
can be read up to there.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_int, expect_text, parse_json
from playground.see.record import BACKGROUND, DEVICE, MAIN, SCHEMA

RECORD = struct.Struct("<5q7i2H2B6x")
"""The binary format of a `EventRecord`. The kind is written last: a record without one is incomplete."""


class EventRecord(NamedTuple):
    """An event. -1 means "none"."""

    start: int
    end: int
    """Nanoseconds of the rank's own clock; 0 if it has not ended."""
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

LANES = (MAIN, BACKGROUND, DEVICE)
LANE_CODES = {lane: code for code, lane in enumerate(LANES)}

EVENTS, VALUES, TABLES = "events", "values", "tables"
FILES = (TABLES, EVENTS, VALUES)
"""The files of each rank, the most important first."""
RUN = "run.json"
"""A description of the run."""
RANK_FILE = re.compile(rf"rank-(\d{{1,9}})\.({'|'.join(FILES)})")
MAX_RANKS = 4096
"""Number of ranks in a recording."""
NAME, SHAPE, GROUP, SOURCE, CLOCK, START, ENDED = "name", "shape", "group", "source", "clock", "start", "end"
"""Subjects of a line of the tables: its first element."""


def place_of(number: int) -> int:
    """The offset of a record in its file, in bytes."""
    return HEADER.size + RECORD.size * number


def file_name(rank: int, kind: str) -> str:
    return f"rank-{rank}.{kind}"


TITLE = b"playground recording "
FASTEST = 1
"""The zlib level: records are so alike that slower ones gain little."""
MAX_RATIO, ALLOWANCE = 100, 2**24
"""A file inflates to at most `MAX_RATIO` times its size plus `ALLOWANCE` bytes; recordings inflate to 3 to 30 times."""


@dataclass(frozen=True)
class Members:
    """The contents of a file or a folder."""

    files: Mapping[str, bytes]
    """Contents by name."""
    is_cut_off: bool = False
    """Whether the end of the file is missing."""


def read_members(path: Path) -> Members:
    """Read a file, or the folder that ranks have written to. Raises `UsageError` if it is no recording or has another
    version, `zlib.error`, `ValueError` or `KeyError` if it is damaged, and `OSError` if it cannot be read."""
    return read_folder(path) if path.is_dir() else read_file(path)


def read_folder(folder: Path) -> Members:
    """Read a folder; of several recordings in it, the last one."""
    tables = sorted(folder.rglob(f"*.{TABLES}"))
    if not tables:
        raise UsageError(f"{folder} is a folder without a recording: name a file that --see has written")
    ours = (file for file in tables[-1].parent.iterdir() if file.name == RUN or RANK_FILE.fullmatch(file.name))
    files = {file.name: file.read_bytes() for file in ours if file.is_file()}
    return Members({name: trim(name, content, files) for name, content in files.items()})


def read_header(events: bytes) -> tuple[bytes, int, int, int]:
    """The header of a rank's events; one of none if it is missing."""
    return HEADER.unpack_from(events) if len(events) >= HEADER.size else (MAGIC, 0, 0, 0)


def trim(name: str, content: bytes, files: Mapping[str, bytes]) -> bytes:
    """The content without unused room at its end."""
    of_rank, _, kind = name.rpartition(".")
    _, capacity, _, values_used = read_header(files.get(f"{of_rank}.{EVENTS}", b""))
    if kind == EVENTS:
        content = content[: place_of(max(0, capacity))].rstrip(b"\0")
        return content + bytes(-len(content) % RECORD.size)
    return content[: 8 * max(0, values_used)] if kind == VALUES else content


def write_file(path: Path, members: Members) -> None:
    """Write a file, atomically. Its end may get lost: first comes what the rest refers to."""

    def importance(member: tuple[str, bytes]) -> tuple[int, str]:
        kinds, kind = ("json", *FILES), member[0].rpartition(".")[2]
        return kinds.index(kind) if kind in kinds else len(kinds), member[0]

    packer = zlib.compressobj(FASTEST)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # not through a link
            file.write(TITLE + str(SCHEMA).encode() + b"\n")
            for name, content in sorted(members.files.items(), key=importance):
                head = json.dumps({"name": name, "bytes": len(content)}).encode() + b"\n"
                file.write(packer.compress(head) + packer.compress(content))
            file.write(packer.flush())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_file(path: Path) -> Members:
    with path.open("rb") as file:
        title = file.readline(len(TITLE) + 10)
        version = title.removeprefix(TITLE).rstrip(b"\n")
        if not title.startswith(TITLE) or not version.isdigit():
            raise UsageError(f"{path} is not a recording: make one with --see FILE.playground")
        check_version(str(path), int(version))
        packed, unpacker = file.read(), zlib.decompressobj()
    content = unpacker.decompress(packed, MAX_RATIO * len(packed) + ALLOWANCE)
    if unpacker.unconsumed_tail:
        raise ValueError(f"it inflates to more than {MAX_RATIO} times its size")
    return Members(split(content), is_cut_off=not unpacker.eof)


def check_version(what: str, version: int) -> None:
    """Raise `UsageError` for a recording of another version."""
    if version != SCHEMA:
        cure = "read it with a newer one" if version > SCHEMA else "record the run again"
        found = f"{what} is a recording of version {version}"
        raise UsageError(f"{found} and this playground reads version {SCHEMA}: {cure}")


def split(content: bytes) -> dict[str, bytes]:
    """The members; the last one may be incomplete. Raises `ValueError` or `KeyError` if they are damaged."""
    files, place = dict[str, bytes](), 0
    while (end := content.find(b"\n", place)) >= 0:
        head = expect_dict(parse_json(content[place:end]))
        place = end + 1 + expect_int(head["bytes"], 0)
        files[expect_text(head["name"])] = content[end + 1 : place]
    return files
