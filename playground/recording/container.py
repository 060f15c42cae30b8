"""A recording as one file: the files of a folder, one after the other. Does not import torch.

The first line says what it is and of which version, in plain text; what follows is one zlib stream: for each member a
line of JSON with its name and its length, then its bytes. What is left of such a file, if its end is missing, can be
read up to there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from playground.recording.layout import EVENTS, FILES, HEADER, RECORD, TABLES, VALUES, place_of
from playground.recording.recording import SCHEMA
from playground.runtime.errors import UsageError

TITLE = b"playground recording "
FASTEST = 1
"""Of zlib's levels: records are so alike that the others gain little."""


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
    files = {file.name: file.read_bytes() for file in tables[-1].parent.iterdir() if file.is_file()}
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
        with unfinished.open("wb") as file:
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
    title, _, packed = path.read_bytes().partition(b"\n")
    version = title.removeprefix(TITLE)
    if not title.startswith(TITLE) or not version.isdigit():
        raise UsageError(f"{path} is not a recording: make one with --see FILE.playground")
    check_version(str(path), int(version))
    unpacker = zlib.decompressobj()
    try:
        files = split(unpacker.decompress(packed))
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is a damaged recording ({error}): record the run anew") from None
    return Members(files, is_cut_off=not unpacker.eof)


def check_version(what: str, version: int) -> None:
    """Raise `UsageError` for a recording that an older or a newer playground has made."""
    if version != SCHEMA:
        cure = "read it with a newer one" if version > SCHEMA else "record the run anew"
        raise UsageError(
            f"{what} is a recording of version {version} and this playground reads version {SCHEMA}: {cure}"
        )


def split(content: bytes) -> dict[str, bytes]:
    """The members, the last one as far as it is there."""
    files: dict[str, bytes] = {}
    place = 0
    while (end := content.find(b"\n", place)) >= 0:
        head = json.loads(content[place:end])
        place = end + 1 + int(head["bytes"])
        files[str(head["name"])] = content[end + 1 : place]
    return files
