"""The manifest of a file in a snapshot: what it is a part of, and its checksum. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from playground.training.snapshots.fingerprint import Fingerprint

SCHEMA = 1
"""Version of the files' layout and of what is in them."""
SHARED = "shared.pt"
"""What is the same on all ranks; rank 0 writes it."""


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
    sha256: str
    written: float
    """Seconds since 1970."""
    fingerprint: Fingerprint


def rank_file(rank: int) -> str:
    """The name of the file with what is this rank's own."""
    return f"rank-{rank}.pt"


def manifest_file(file: Path) -> Path:
    return file.with_suffix(".json")


def encode(manifest: Manifest) -> bytes:
    """One line of JSON and, on a second line, its checksum."""
    line = json.dumps(asdict(manifest), allow_nan=False)
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def read_manifest(file: Path) -> Manifest:
    """The manifest of `file`.

    Raises `FileNotFoundError` if there is none, another `OSError` or `ValueError` if it cannot be read or is damaged,
    `OtherSchema` if it is whole and another version's.
    """
    line, _, checksum = manifest_file(file).read_bytes().partition(b"\n")
    if f"{hashlib.sha256(line).hexdigest()}\n".encode() != checksum:
        raise ValueError("its checksum differs")
    content = json.loads(line)
    if content.get("schema") != SCHEMA:
        raise OtherSchema(content.get("schema"))
    return Manifest(**content)
