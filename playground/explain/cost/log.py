"""The log that each rank writes. Does not import torch."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from playground.base.event_log import Format, LogReader, read_lines
from playground.base.untrusted import expect_int, expect_list, expect_text
from playground.explain.cost.profile import Amounts, Place, RankCosts

ROW = "row"
"""Subject of the lines of a log that name its rows: [[file, line, function, path], operation]."""
MOST_ROWS = 4096
"""Later lines and operations share one row more, which has no name."""
BEGAN, ENDED, LAST, SINCE, WAITS = range(5)
"""Numbers before the rows: the moments at which the program began, ended, and called the last
operation; since when the main thread waits, and its row. All moments are seconds of the host's
monotonic clock; 0 is none."""
HEAD = 8
"""How many numbers there are before the rows."""
CALLS, SENT, WAITED, HIDDEN = range(4)
"""The numbers of a row, which are fields of `Amounts`."""
WIDTH = 4
MARK = struct.Struct("<q")
FORMAT = Format(
    title=b"plgcost1", record=MARK, mark=MARK, capacity=1, words=HEAD + WIDTH * (MOST_ROWS + 1),
    text=2**20,
)  # fmt: skip


def file_name(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank}.cost"


def read_ranks(folder: Path, size: int, now: float) -> tuple[RankCosts, ...]:
    """What ranks have left in a folder. `now` is a moment after the last one's end."""
    return tuple(read_rank(folder / file_name(rank), rank, now) for rank in range(size))


def read_rank(log: Path, rank: int, now: float) -> RankCosts:
    """What a rank has written. One that was ended while it waited has waited until `now`."""
    try:
        reader = LogReader(os.open(log, os.O_RDONLY), FORMAT)
    except (OSError, ValueError):  # it has not begun
        return RankCosts(rank, 0.0, {})
    numbers = memoryview(reader.read_words()).cast("d")
    head = [float(number) for number in numbers[:HEAD]]
    rows = dict(read_rows(reader.read_text(), numbers[HEAD:]))
    end = head[ENDED] or head[LAST]
    if head[SINCE] and not head[ENDED]:
        end = now
        place = [*rows][int(head[WAITS])] if head[WAITS] < len(rows) else Place("", 0, "", "")
        rows[place] = rows.get(place, Amounts()) + Amounts(waited=now - head[SINCE])
    return RankCosts(rank, max(0.0, end - head[BEGAN]), rows)


def read_rows(text: bytes, numbers: Sequence[float]) -> Iterator[tuple[Place, Amounts]]:
    """The rows of a log, in the order in which they began."""
    for row, (_, thing) in enumerate(read_lines(text)):
        source, operation = expect_list(thing)
        file, line, function, path = expect_list(source) if source else ("", 0, "", "")
        amounts = Amounts(*numbers[WIDTH * row : WIDTH * (row + 1)])
        yield (
            Place(
                expect_text(file), expect_int(line), expect_text(function),
                expect_text(operation), expect_text(path),
            ),
            amounts,
        )  # fmt: skip
    rest = Amounts(*numbers[WIDTH * MOST_ROWS : WIDTH * (MOST_ROWS + 1)])
    if rest != Amounts():
        yield Place("", 0, "", "others"), rest
