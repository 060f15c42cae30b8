"""What was alive on a GPU when it held most, and how it is read from what ranks have recorded. Does
not import torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from playground.base.untrusted import (
    expect_dict,
    expect_int,
    expect_list,
    expect_text,
    parse_json,
)
from playground.explain.memory import KINDS, file_name


@dataclass(frozen=True)
class Row:
    """Tensors of one kind that one line has caused."""

    where: str
    """The line, as train.py:31; "no line" if none is known."""
    kind: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Peak:
    """What was alive on a GPU when it held most, or when something more did not fit."""

    rank: int
    device: int
    capacity: int
    """Bytes of the GPU."""
    nbytes: int
    """The bytes of the tensors that were alive."""
    reserved: int
    """The most that PyTorch's allocator has reserved for tensors."""
    where: str
    """The line that allocated last."""
    lacking: int
    """The bytes that this line asked for and that did not fit; 0 if they did."""
    rows: tuple[Row, ...]
    """The largest first."""

    def by_kind(self) -> dict[str, int]:
        """Bytes, the kinds with most of them first."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.kind] += row.nbytes
        return dict(found.most_common())


def read_peaks(folder: Path, size: int) -> list[Peak]:
    """What ranks have left in a folder, by rank and GPU. A rank that was killed has left
    nothing."""
    peaks = []
    for rank in range(size):
        try:
            found = expect_list(parse_json((folder / file_name(rank)).read_bytes()))
            peaks += [read_peak(rank, expect_dict(each)) for each in found]
        except (OSError, ValueError, KeyError):
            continue
    return peaks


def read_peak(rank: int, found: dict[str, object]) -> Peak:
    rows = [Row(*read_row(expect_list(each))) for each in expect_list(found["rows"])]
    numbers = ("device", "capacity", "nbytes", "reserved", "lacking")
    return Peak(
        rank=rank,
        where=expect_text(found["where"]),
        rows=tuple(sorted(rows, key=lambda row: (-row.nbytes, row.where))),
        **{name: expect_int(found[name], 0) for name in numbers},
    )


def read_row(found: list[object]) -> tuple[str, str, int, int]:
    where, kind, tensors, nbytes = found
    name = KINDS[expect_int(kind, 0, len(KINDS) - 1)]
    return expect_text(where), name, expect_int(tensors, 0), expect_int(nbytes, 0)
