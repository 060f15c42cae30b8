"""What does it cost? The communication of a program, by its lines. Does not import torch.

Each rank writes amounts into a log of its own, which is there after the rank was killed. An amount
belongs to a line of the program and to an operation that the line calls. What
DistributedDataParallel and FSDP send by themselves belongs to the line that caused it: the
constructor, the forward or `backward()`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from playground.base.event_log import Format, LogReader, read_lines
from playground.base.untrusted import expect_int, expect_list, expect_text

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


@dataclass(frozen=True)
class Amounts:
    """What communication costs."""

    calls: float = 0.0
    sent: float = 0.0
    """Bytes. Messages are counted as they are, and so are the messages of the playground's own
    all-reduces. A collective is counted by its formula: `algorithms.cost_model.bytes_sent`."""
    waited: float = 0.0
    """Seconds in calls that block, and in waits. On a GPU, seconds for which its stream stood
    still."""
    hidden: float = 0.0
    """Seconds of asynchronous calls during which the program did something else: from the call
    until the backend was done or, if that came first, until the program waited. The seconds of
    calls that overlap each other are added up."""

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.calls + other.calls,
            self.sent + other.sent,
            self.waited + other.waited,
            self.hidden + other.hidden,
        )


@dataclass(frozen=True, order=True)
class Place:
    """An operation on a line of the program."""

    file: str
    """Its path, relative to the package or to the working folder. Empty: no line is known."""
    line: int
    function: str
    """The program's, which the line stands in."""
    operation: str
    """The function of torch.distributed; `… in C++` if torch has called it there, `….wait` for a
    wait."""
    path: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "no line"


@dataclass(frozen=True)
class RankCosts:
    """The communication of one rank."""

    rank: int
    seconds: float
    """How long the program ran, until it ended or was ended."""
    rows: dict[Place, Amounts] = field(repr=False)

    @property
    def total(self) -> Amounts:
        return sum(self.rows.values(), Amounts())


@dataclass(frozen=True)
class Row:
    """An operation on a line of the program, on all ranks."""

    place: Place
    ranks: tuple[Amounts, ...]
    """In rank order."""

    @property
    def total(self) -> Amounts:
        return sum(self.ranks, Amounts())


@dataclass(frozen=True)
class Profile:
    """The communication of a run."""

    command: tuple[str, ...]
    backend: str
    ranks: tuple[RankCosts, ...]

    @property
    def seconds(self) -> float:
        """The seconds of all ranks."""
        return sum((rank.seconds for rank in self.ranks), 0.0)

    @property
    def rows(self) -> list[Row]:
        """The most expensive first: by the time waited, then by the bytes sent."""
        places = dict.fromkeys(place for rank in self.ranks for place in rank.rows)
        rows = [
            Row(place, tuple(rank.rows.get(place, Amounts()) for rank in self.ranks))
            for place in sorted(places)
        ]
        rows.sort(key=lambda row: (-row.total.waited, -row.total.sent))
        return rows

    @property
    def total(self) -> Amounts:
        return sum((rank.total for rank in self.ranks), Amounts())

    def share(self, amounts: Amounts) -> float:
        """The part of the run that is spent waiting for this."""
        return amounts.waited / self.seconds if self.seconds else 0.0

    def conclude(self) -> str:
        """The answer in one sentence."""
        total = self.total
        if not total.calls:
            return "The program calls no operation of torch.distributed."
        if not total.waited:
            return "None of the run is spent waiting."
        by_line: dict[str, float] = {}
        for row in self.rows:
            by_line[row.place.where] = by_line.get(row.place.where, 0.0) + row.total.waited
        where = max(by_line, key=lambda line: by_line[line])
        part = say_share(by_line[where] / total.waited)
        return f"{self.share(total):.0%} of the run is spent waiting, {part} in {where}."


SHARES = {
    1.0: "all of it", 3 / 4: "three quarters of it", 2 / 3: "two thirds of it",
    1 / 2: "half of it", 1 / 3: "a third of it", 1 / 4: "a quarter of it",
}  # fmt: skip


def say_share(share: float) -> str:
    """A share as it is spoken, if it is within two hundredths of one that has a name."""
    nearest = min(SHARES, key=lambda known: abs(known - share))
    return SHARES[nearest] if abs(nearest - share) <= 0.02 else f"{share:.0%} of it"


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
