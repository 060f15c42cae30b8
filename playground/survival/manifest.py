"""The file of one rank in a snapshot. Does not import torch.

line 1   the manifest, as JSON: what the file is a part of, the length of all that follows line 2, and its checksum
line 2   the checksum of line 1
line 3   the state, as JSON, with dtype, shape, strides and offset in the place of each tensor (see snapshots.py)
then     the tensors' bytes
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from playground.survival.fingerprint import Fingerprint

SCHEMA = 2
"""Version of the files' layout and of what is in them."""
BLOCK = 2**20
"""Bytes that are read at a time."""
MAX_LINE = 2**20
"""Bytes of a manifest."""
MAX_DEPTH = 256
"""Levels of nesting of a state, and of a fingerprint."""
DTYPE = re.compile(r"[a-z]+(\d*)\w*", re.ASCII)
"""The name of a dtype. Its first number is the bits of an element; without one, as for bool, it is a byte."""


class OtherSchema(Exception):
    """The manifest is whole, and of a version that this program does not read."""

    def __init__(self, schema: object) -> None:
        super().__init__(f"it has schema version {schema}, and this program reads version {SCHEMA}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Raises `ValueError` for what no run writes."""

    schema: int = SCHEMA
    step: int
    size: int
    """Ranks of the run."""
    nbytes: int
    """Length of the part after the second line, in bytes."""
    sha256: str
    """Checksum of the same part."""
    written: float
    """Seconds since 1970."""
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        whole = all(is_count(number) for number in (self.step, self.size, self.nbytes)) and self.size > 0
        timed = isinstance(self.written, (int, float)) and 0 <= self.written < 2**40
        if not (whole and timed and isinstance(self.sha256, str) and isinstance(self.fingerprint, dict)):
            raise ValueError("it says what no run writes")


def rank_file(rank: int) -> str:
    """The name of this rank's file. Rank 0's also holds what is the same on all ranks."""
    return f"rank-{rank}.snapshot"


def encode(manifest: Manifest) -> bytes:
    """The first two lines."""
    line = json.dumps(vars(manifest), allow_nan=False)
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def open_part(file: Path) -> io.BufferedReader:
    """`file`, open for reading. Raises as `decode` does."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is no file")  # a FIFO would be waited for
        return open(file, "rb")
    except FileNotFoundError:
        if file.with_suffix(".json").exists():  # version 1 had the manifest in a file of its own
            raise OtherSchema(1) from None
        raise


def decode(stream: BinaryIO) -> Manifest:
    """The manifest, the first two lines of a rank's file. Raises `FileNotFoundError` if there is none, another
    `OSError` or `ValueError` if it cannot be read or is damaged, `OtherSchema` if it is whole and another version's."""
    line, checksum = stream.readline(MAX_LINE), stream.readline(MAX_LINE)
    if not line:
        raise FileNotFoundError("it is empty: a disk that was full has left nothing but its name")
    if f"{hashlib.sha256(line[:-1]).hexdigest()}\n".encode() != checksum:
        raise ValueError("its checksum differs")
    content = parse(line)
    if not isinstance(content, dict) or not is_count(content.get("schema")):
        raise ValueError("it is no manifest")
    json.dumps(content, allow_nan=False)
    if content["schema"] != SCHEMA:
        raise OtherSchema(content["schema"])
    try:
        return Manifest(**content)
    except TypeError:
        raise ValueError("it lacks a field, or has one too many") from None


def parse(line: bytes) -> Any:
    """A line of JSON. Raises `ValueError`, also for nesting beyond `MAX_DEPTH`."""
    try:
        content = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [content], 0
    while level := [value for value in level if isinstance(value, (dict, list))]:
        level = [each for value in level for each in (value.values() if isinstance(value, dict) else value)]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    return content


def is_count(value: object) -> bool:
    """Whether it is a whole number, such as there may be bytes of."""
    return type(value) is int and 0 <= value < 2**63


def check_state(line: bytes, nbytes: int) -> None:
    """Raise `ValueError` or `TypeError` unless `line`, the third, is of a state as `Buffers` describes it, whose
    tensors lie in the `nbytes` bytes that follow and take no more."""
    level, needed = [parse(line)], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, list):
                below += value
            elif isinstance(value, dict):
                [(kind, content)] = value.items()
                if kind == "tensor":
                    needed += measure_tensor(*content, nbytes=nbytes)
                elif kind == "dict":
                    below += [each for pair in content for each in check_item(*pair)]
                elif kind == "tuple" and isinstance(content, list):
                    below += content
                else:
                    raise ValueError(f"{kind} is nothing that a snapshot holds")
        level = below
    if needed > nbytes:
        raise ValueError("its tensors lie in each other")


def check_item(key: Any, value: Any) -> list[Any]:
    """A key, which must be fit to be one, and its value."""
    parts: Any = key.get("tuple") if isinstance(key, dict) else [key]
    if any(isinstance(part, (dict, list)) for part in parts):
        raise ValueError("it has a key that is none")
    return [key, value]


def measure_tensor(dtype: str, shape: list[int], strides: list[int], offset: int, *, nbytes: int) -> int:
    """The bytes that a tensor takes in a memory of `nbytes`. Raises `ValueError` if it lies outside of it."""
    name = DTYPE.fullmatch(dtype)
    if not name or len(shape) != len(strides) or not all(map(is_count, [offset, *shape, *strides])):
        raise ValueError("it is no layout of a tensor")
    itemsize = max(1, int(name[1] or 8) // 8)
    number = math.prod(shape)
    extent = number and 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if offset % itemsize or offset + itemsize * max(number, extent) > nbytes:
        raise ValueError("a tensor lies beyond the data")
    return itemsize * number


def sha256_of_rest(stream: BinaryIO) -> str:
    """The checksum of all that has not been read yet."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()
