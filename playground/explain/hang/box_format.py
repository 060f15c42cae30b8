"""The format of a flight recorder in memory: what stands where in its header, its records, its
counts and its text. Does not import torch."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from playground.base.event_log import HEADER, OWN, Format
from playground.explain.hang.states import Channel, channel_of

CAPACITY = 2048
"""Number of operations in the ring."""
MOST_CHANNELS = 8192
"""Number of channels that are told apart."""
PID, RANK, SIZE, PROGRAMS, ENDED, MAIN, ANSWERS, GPU = range(OWN, OWN + 8)
"""Places in the header, in units of 8 bytes. `PROGRAMS` counts those that have begun, `ENDED` those
that have returned; `MAIN` is the number of the operation that the main thread is in, or -1. As long
as `BEGUN` and `MAIN` stay as they are, the main thread has begun and ended no operation. `ANSWERS`
is 1 if the rank answers `box.QUESTION`, `GPU` a number of `Gpu`."""
MOST_SIZES = 6
"""Number of a shape's sizes in a record: the last one is the product of those that have no
place."""
MOST_BEHIND = 3
"""Number of batches of which is told that an operation is behind them."""
HEADS = [
    struct.Struct(f"<qqiiiii4x{8 * (1 + MOST_BEHIND)}x{sizes}q{8 * (MOST_SIZES - sizes)}xq")
    for sizes in range(MOST_SIZES + 1)
]
"""when called (ns), when done, index + 1, line, description, what had been raised, number of sizes,
sizes, mark"""
RECORD = HEADS[-1]
RAISED_AT = 5
"""The place among these fields of what had been raised."""
QUEUE = struct.Struct(f"<{1 + MOST_BEHIND}q")
"""Of an operation in a stream of a GPU, in the room after these fields, which is 0 for others: its
batch and flags, and the batches that it is behind, plus 1."""
FIRST, LENGTH = HEADER, RECORD.size // 8
"""Where the first record begins, and how long each is, in units of 8 bytes."""
DONE_AT, QUEUE_AT, MARK_AT = 1, 5, LENGTH - 1
"""Offsets in a record, in units of 8 bytes."""
IS_QUEUED, IS_OPEN = 1, 2
"""Flags: whether a stream carries it out, and whether its batch has no end yet. The batch is above
them."""
FLAGS = 2
"""Number of bits of the flags."""
MARK = struct.Struct(f"<{8 * MARK_AT}xq")
MAY_GIVE_UP = -1
"""In the place of when it was done: it is not, and has a time limit of its own."""
FORMAT = Format(
    title=b"PLAYBOX7", record=RECORD, mark=MARK, capacity=CAPACITY, words=MOST_CHANNELS, ring=True
)
COUNTS = FORMAT.words_at // 8
"""Where the counts by channel begin, in units of 8 bytes."""
OVERFLOW = COUNTS + MOST_CHANNELS - 1
"""The count of what is not told apart: see `box.FULL`."""
WORLD, CHANNEL, OPERATION, LINE, RAISED, UNNAMED, LOADER = (
    "world", "channel", "operation", "line", "raised", "unnamed", "loader",
)  # fmt: skip
"""Subjects of lines of the text."""


class Description(NamedTuple):
    """What operations have in common that are described once: see `Operation`."""

    kind: str
    name: str
    group: tuple[int, ...] = ()
    dtype: Any = ""
    """Torch's own, or a text."""
    peer: int | None = None
    tag: int = 0
    number: int = 0
    members: tuple[int, ...] = ()

    @property
    def channel(self) -> Channel:
        return channel_of(self.kind, self.name, self.group, self.peer, self.tag, self.number)
