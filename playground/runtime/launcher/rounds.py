"""Lines of several ranks in rounds: the first lines of all ranks together, in rank order, then the
second lines, and so on.

A line is held back until every other rank has printed as many, for `HOLD` seconds at most, and not
for a rank whose program has ended. What overwrites itself, and the beginning of a line, is not held
back: a person is to see it now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

HOLD = 0.5
"""Seconds for which a line waits for those of other ranks."""
Line = TypeVar("Line")


class Rounds(Generic[Line]):
    """Decides when lines are passed on."""

    def __init__(self, size: int) -> None:
        self.held: list[deque[tuple[float, Line]]] = [deque() for _ in range(size)]
        """By rank, the lines that wait, each with the time at which it has waited long enough."""
        self.passed = [0] * size
        """By rank, the number of lines that were passed on."""

    def add(self, rank: int, line: Line) -> None:
        """Take in a line of a rank, after those that it printed before."""
        self.held[rank].append((time.monotonic() + HOLD, line))

    def take(self, running: Collection[int]) -> list[tuple[int, Line]]:
        """The lines that are due, each with its rank, in the order in which they are to be passed
        on. `running`: the ranks that may print more."""
        now, due = time.monotonic(), list[tuple[int, int, Line]]()
        printed = {rank: self.passed[rank] + len(self.held[rank]) for rank in running}
        complete = min(printed.values(), default=None)
        for rank, lines in enumerate(self.held):
            while lines:
                number, (expires, line) = self.passed[rank], lines[0]
                if complete is not None and number >= complete and now < expires:
                    break
                lines.popleft()
                self.passed[rank] += 1
                due.append((number, rank, line))
        due.sort(key=lambda each: each[:2])
        return [(rank, line) for _, rank, line in due]

    def take_of(self, rank: int) -> list[Line]:
        """All lines of a rank, due or not."""
        lines = [line for _, line in self.held[rank]]
        self.passed[rank] += len(lines)
        self.held[rank].clear()
        return lines

    @property
    def seconds_left(self) -> float:
        """Until a line has waited long enough; infinite where none waits."""
        expires = min((lines[0][0] for lines in self.held if lines), default=float("inf"))
        return max(0.0, expires - time.monotonic())
