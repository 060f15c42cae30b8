"""How a rank's recording lies in its folder. Does not import torch.

Each rank has three files. `rank-R.events` is mapped into the rank's memory: a header and, for each event, a record of
fixed size. `rank-R.values` is mapped too: what small tensors held, as float64. `rank-R.tables` is written line by line,
as JSON: what the rank is, and whatever records refer to by number. All of it is in the hands of the system as soon as
it is written, so that it outlives the rank, however that ends.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from playground.see.record.recording import BACKGROUND, DEVICE, KINDS, MAIN

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
