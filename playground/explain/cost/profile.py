"""What communication has cost, by line of the program and by rank. Does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

CLEAR = 0.1
"""By how much of their time others wait longer than the rank that they wait for, at least."""


@dataclass(frozen=True)
class Amounts:
    """What communication costs."""

    calls: float = 0.0
    sent: float = 0.0
    """Bytes. Messages are counted as they are, and so are the messages of the playground's own
    all-reduces. A collective is counted by its formula: `algorithms.bytes_sent.bytes_sent`."""
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
        """The answer: which part of the run is spent waiting, where, and for whom."""
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
        whom = f" {awaited}" if (awaited := self.find_awaited(where)) else ""
        return f"{self.share(total):.0%} of the run is spent waiting, {part} in {where}.{whom}"

    def find_awaited(self, where: str) -> str:
        """A sentence on the rank for which the others wait in the line that they all wait in most:
        the one that waits much less than each of them. Empty if there is none."""
        rows = [row for row in self.rows if row.place.where == where]
        share = {rank.rank: rank.total.waited / (rank.seconds or 1.0) for rank in self.ranks}
        if len(share) < 2 or not any(all(each.calls for each in row.ranks) for row in rows):
            return ""
        least, second, *_ = ordered = sorted(share, key=lambda rank: share[rank])
        if share[second] < max(2 * share[least], share[least] + CLEAR):
            return ""
        one = f"Rank {least} waits {share[least]:.0%} of its time"
        if len(ordered) > 2:
            return f"{one}, the others {share[second]:.0%} or more: they wait for rank {least}."
        return f"{one}, rank {second} {share[second]:.0%}: it waits for rank {least}."


SHARES = {
    1.0: "all of it", 3 / 4: "three quarters of it", 2 / 3: "two thirds of it",
    1 / 2: "half of it", 1 / 3: "a third of it", 1 / 4: "a quarter of it",
}  # fmt: skip


def say_share(share: float) -> str:
    """A share as it is spoken, if it is within two hundredths of one that has a name."""
    nearest = min(SHARES, key=lambda known: abs(known - share))
    return SHARES[nearest] if abs(nearest - share) <= 0.02 else f"{share:.0%} of it"
