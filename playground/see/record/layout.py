"""How a recording lies on the disk: as a folder with three files per rank, or as one file. Does not import torch.

`rank-R.events` is mapped into the rank's memory: a header and, for each event, a record of fixed size. `rank-R.values`
is mapped too: what small tensors held, as float64. `rank-R.tables` is written line by line, as JSON: what the rank is,
and whatever records refer to by number. All of it is in the hands of the system as soon as it is written, so that it
outlives the rank, however that ends.

One file holds the files of such a folder, one after the other. Its first line says what it is and of which version, in
plain text; what follows is one zlib stream: for each member a line of JSON with its name and its length, then its
bytes. What is left of such a file, if its end is missing, can be read up to there.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_dict, expect_int, expect_text, parse_json
from playground.see.record.recording import BACKGROUND, DEVICE, KINDS, MAIN, SCHEMA

RECORD = struct.Struct("<5q7i2H2B6x")
"""How a `Record` lies in the file. The kind is written last: a record without one is not whole."""


class Record(NamedTuple):
    """An event. -1 stands for "none"."""

    start: int
    end: int
    """Nanoseconds of the rank's own clock; an end of 0 is still to come."""
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


WORDS, HALVES = RECORD.size // 8, RECORD.size // 4
"""What a record is long, in units of 8 and of 4 bytes."""
END, VALUES_AT = 1, 4
"""Places in a record, in units of 8 bytes."""
PEER_AT, MESSAGE_AT, WAIT_AT = 11, 12, 14
"""The same in units of 4 bytes."""
LANE_AT = 72
"""In bytes."""
SPAN = 128
"""More than the values that one event can have."""
MAX_VALUES = 64
"""Of larger tensors only the shape is recorded."""

HEADER = struct.Struct("<8s3q48x")
"""MAGIC, capacity, dropped, number of values: as long as a record, and in front of them."""
CAPACITY_AT, DROPPED_AT, VALUES_USED_AT = 1, 2, 3
MAGIC = b"PLAYREC1"
NONE = -1

KIND_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}
LANES = (MAIN, BACKGROUND, DEVICE)
LANE_CODES = {lane: code for code, lane in enumerate(LANES)}

EVENTS, VALUES, TABLES = "events", "values", "tables"
FILES = (TABLES, EVENTS, VALUES)
"""Of each rank, in the order in which they are worth having."""
RUN = "run.json"
"""What was run."""
RANK_FILE = re.compile(rf"rank-(\d{{1,9}})\.({'|'.join(FILES)})")
MAX_RANKS = 4096
"""Of a recording."""


def place_of(number: int) -> int:
    """Where the record of that number begins, in bytes."""
    return HEADER.size + RECORD.size * number


def file_name(rank: int, kind: str) -> str:
    return f"rank-{rank}.{kind}"


TITLE = b"playground recording "
FASTEST = 1
"""Of zlib's levels: records are so alike that the others gain little."""
MAX_RATIO, ALLOWANCE = 100, 2**24
"""A file inflates to no more than so many times its size and so many bytes more: recordings, to 3 to 30 times."""
BLOCK = 2**20
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Members:
    """What a container or a folder holds, by name."""

    files: Mapping[str, bytes]
    is_cut_off: bool = False
    """Whether the end of the file is missing."""


def read_members(path: Path) -> Members:
    """From a file, or from the folder that ranks have written to. Raises `UsageError` if it is not a recording, if it
    is damaged, or if another version has written it; `OSError` if it cannot be read."""
    return read_folder(path) if path.is_dir() else read_file(path)


def read_folder(folder: Path) -> Members:
    """Of a folder with several recordings in it, the last one."""
    tables = sorted(folder.rglob(f"*.{TABLES}"))
    if not tables:
        raise UsageError(f"{folder} is a folder without a recording: name a file that --see has written")
    ours = (file for file in tables[-1].parent.iterdir() if file.name == RUN or RANK_FILE.fullmatch(file.name))
    files = {file.name: file.read_bytes() for file in ours if file.is_file()}
    return Members({name: trim(name, content, files) for name, content in files.items()})


def trim(name: str, content: bytes, files: Mapping[str, bytes]) -> bytes:
    """Without the room that has not been used."""
    of_rank, _, kind = name.rpartition(".")
    events = files.get(f"{of_rank}.{EVENTS}", b"")
    _, capacity, _, values_used = HEADER.unpack_from(events) if len(events) >= HEADER.size else (b"", 0, 0, 0)
    if kind == EVENTS:
        content = content[: place_of(max(0, capacity))].rstrip(b"\0")
        return content + bytes(-len(content) % RECORD.size)
    return content[: 8 * max(0, values_used)] if kind == VALUES else content


def write_file(path: Path, members: Members) -> None:
    """Write all of it, or nothing."""
    packer = zlib.compressobj(FASTEST)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # not through a link that somebody has put there
            file.write(TITLE + str(SCHEMA).encode() + b"\n")
            for name, content in sorted(members.files.items(), key=importance):
                head = json.dumps({"name": name, "bytes": len(content)}).encode() + b"\n"
                file.write(packer.compress(head) + packer.compress(content))
            file.write(packer.flush())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def importance(member: tuple[str, bytes]) -> tuple[int, str]:
    """What is to come first in a file, whose end may get lost: what all the rest refers to."""
    name, _ = member
    kinds = ("json", *FILES)
    kind = name.rpartition(".")[2]
    return kinds.index(kind) if kind in kinds else len(kinds), name


def read_file(path: Path) -> Members:
    with path.open("rb") as file:
        title = file.readline(len(TITLE) + 10)
        version = title.removeprefix(TITLE).rstrip(b"\n")
        if not title.startswith(TITLE) or not version.isdigit():
            raise UsageError(f"{path} is not a recording: make one with --see FILE.playground")
        check_version(str(path), int(version))
        try:
            content, is_whole = inflate(file)
            return Members(split(content), is_cut_off=not is_whole)
        except (zlib.error, ValueError, KeyError) as error:
            raise UsageError(f"{path} is a damaged recording ({error}): record the run anew") from None


def inflate(file: BinaryIO) -> tuple[bytes, bool]:
    """What the rest of the file holds, and whether its end is there. Raises `zlib.error`, or `ValueError` where that
    would be far more than a recording holds."""
    unpacker, parts = zlib.decompressobj(), list[bytes]()
    allowed = ALLOWANCE
    while not unpacker.eof and (packed := file.read(BLOCK)):
        allowed += MAX_RATIO * len(packed)
        parts.append(unpacker.decompress(packed, allowed))
        if unpacker.unconsumed_tail:
            raise ValueError(f"it inflates to more than {MAX_RATIO} times its size")
        allowed -= len(parts[-1])
    return b"".join(parts), unpacker.eof


def check_version(what: str, version: int) -> None:
    """Raise `UsageError` for a recording that an older or a newer playground has made."""
    if version != SCHEMA:
        cure = "read it with a newer one" if version > SCHEMA else "record the run anew"
        raise UsageError(
            f"{what} is a recording of version {version} and this playground reads version {SCHEMA}: {cure}"
        )


def split(content: bytes) -> dict[str, bytes]:
    """The members, the last one as far as it is there. Raises `ValueError` or `KeyError` for what is none."""
    files: dict[str, bytes] = {}
    place = 0
    while (end := content.find(b"\n", place)) >= 0:
        head = expect_dict(parse_json(content[place:end]))
        place = end + 1 + expect_int(head["bytes"], 0)
        files[expect_text(head["name"])] = content[end + 1 : place]
    return files
