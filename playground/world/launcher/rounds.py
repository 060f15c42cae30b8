"""Lines of several ranks in rounds: the first lines of all ranks together, in rank order, then the
second lines, and so on.

A line is held back until every other rank has printed as many, for `HOLD` seconds at most, and not
for a rank whose program has ended. What overwrites itself, and the beginning of a line, is not held
back: a person is to see it now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import groupby
from multiprocessing.connection import wait
from typing import Generic, TypeVar

from playground.world.launcher.output import HeldOutput

ROUNDS = "rounds"
"""The value of `LaunchConfig.output`."""
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
                number = self.passed[rank]
                expires, line = lines[0]
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


class OutputInRounds(HeldOutput):
    """A rank's stdout whose lines wait for those of the other ranks."""

    world: WorldInRounds

    @property
    def may_print(self) -> bool:
        """Whether there may be more to pass on: its program goes on, or something has arrived."""
        if self.pipe.closed:
            return False
        return not self.world.has_ended(self.rank) or bool(wait([self.pipe], 0))

    def relay_all(self) -> None:
        super().relay_all()
        self.world.pass_on()

    def write(self, data: bytes) -> None:
        """Hold whole lines back. What overwrites itself, a beginning of a line and what follows it
        are shown at once, after what this rank has printed before."""
        *lines, rest = data.split(b"\n")
        if rest or b"\r" in data or self.end not in b"\r\n":
            self.show(b"".join([*self.world.lines.take_of(self.rank), data]))
            return
        for line in lines:
            self.world.lines.add(self.rank, line + b"\n")

    def show(self, data: bytes) -> None:
        super().write(data)


class WorldInRounds:
    """The stdout of all ranks of a world."""

    def __init__(self, size: int, has_ended: Callable[[int], bool]) -> None:
        """`has_ended(rank)`: whether the program of a rank has ended."""
        self.lines = Rounds[bytes](size)
        self.outputs: dict[int, OutputInRounds] = {}
        self.has_ended = has_ended
        self.size = size

    @property
    def seconds_left(self) -> float:
        return self.lines.seconds_left

    def pass_on(self, *, all_lines: bool = False) -> None:
        """Show the lines that are due, or all."""
        running: set[int] = set()
        if not all_lines:
            starting = {*range(self.size)} - {*self.outputs}
            running = starting | {rank for rank, each in self.outputs.items() if each.may_print}
        for rank, lines in groupby(self.lines.take(running), lambda due: due[0]):
            self.outputs[rank].show(b"".join(line for _, line in lines))
