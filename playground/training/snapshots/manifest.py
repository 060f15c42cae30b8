"""The file of one rank in a snapshot. Does not import torch.

line 1   the manifest, as JSON: what the file is a part of, the length of all that follows line 2, and its checksum
line 2   the checksum of line 1
line 3   the state, as JSON, with dtype, shape, strides and offset in the place of each tensor (see buffers.py)
then     the tensors' bytes
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from playground.training.snapshots.fingerprint import Fingerprint

SCHEMA = 2
"""Version of the files' layout and of what is in them."""
BLOCK = 2**20
"""Bytes that are read at a time."""


class OtherSchema(Exception):
    """The manifest is whole, and of a version that this program does not read."""

    def __init__(self, schema: object) -> None:
        super().__init__(f"it has schema version {schema}, and this program reads version {SCHEMA}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    schema: int = SCHEMA
    step: int
    size: int
    """Ranks of the run."""
    nbytes: int
    """Of what follows the second line."""
    sha256: str
    """Of the same."""
    written: float
    """Seconds since 1970."""
    fingerprint: Fingerprint


def rank_file(rank: int) -> str:
    """The name of this rank's file. Rank 0's also holds what is the same on all ranks."""
    return f"rank-{rank}.snapshot"


def encode(manifest: Manifest) -> bytes:
    """The first two lines."""
    line = json.dumps(vars(manifest), allow_nan=False)
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def read_manifest(file: Path) -> Manifest:
    """The manifest of `file`.

    Raises `FileNotFoundError` if there is none, another `OSError` or `ValueError` if it cannot be read or is damaged,
    `OtherSchema` if it is whole and another version's.
    """
    with open_part(file) as stream:
        return decode(stream)


def open_part(file: Path) -> io.BufferedReader:
    """`file`, open for reading. Raises as `read_manifest` does."""
    try:
        return open(file, "rb")
    except FileNotFoundError:
        if file.with_suffix(".json").exists():  # version 1 had the manifest in a file of its own
            raise OtherSchema(1) from None
        raise


def decode(stream: BinaryIO) -> Manifest:
    """The manifest, read from the first two lines of a rank's file. Raises as `read_manifest` does."""
    line, checksum = stream.readline(), stream.readline()
    if not line:
        raise FileNotFoundError("it is empty: a disk that was full has left nothing but its name")
    if f"{hashlib.sha256(line[:-1]).hexdigest()}\n".encode() != checksum:
        raise ValueError("its checksum differs")
    content = json.loads(line)
    if content.get("schema") != SCHEMA:
        raise OtherSchema(content.get("schema"))
    return Manifest(**content)


def sha256_of_rest(stream: BinaryIO) -> str:
    """The checksum of all that has not been read yet."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()
