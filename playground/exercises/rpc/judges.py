"""Judges of the exercises on rpc."""

from __future__ import annotations

from playground.exercises.cases import Case, Cases
from playground.exercises.exercise import count

ALL = 100


class Service:
    """Answers 3x + 1, the latest request first, whenever it has got `batch` requests; `calls` in
    all."""

    def __init__(self, batch: int, calls: int) -> None:
        self.batch, self.left, self.held = batch, calls, list[tuple[object, int]]()

    def submit(self, ticket: object, argument: int) -> list[tuple[object, int]]:
        self.held.append((ticket, 3 * argument + 1))
        self.left -= 1
        return self.answer() if len(self.held) == self.batch else []

    def close(self) -> list[tuple[object, int]]:
        if self.left:
            raise RuntimeError(
                f"close() is for when all requests are there; {self.left} more will come"
            )
        return self.answer()

    def answer(self) -> list[tuple[object, int]]:
        ready, self.held = self.held[::-1], []
        return ready


def call(rank: int, size: int, seed: int) -> Cases:
    """Remote calls over messages: requests are numbered, and replies find their way back in any
    order."""
    for batch, calls in (
        (2, [0, 3, 4, 2, 5]),
        (1, [0, 3, 3, 3, 3]),
        (4, [0, 6, 0, 1, 7]),
        (ALL, [0, 3, 2, 3, 1]),
    ):
        arguments = [10**8 * rank + 7 * number % 3 for number in range(calls[rank])]
        about = "all answers at the end" if batch == ALL else f"{count(batch, 'answer')} at a time"
        given = (arguments, calls[:size], Service(batch, sum(calls[:size])) if rank == 0 else None)
        yield Case(
            about, given, returns=[3 * argument + 1 for argument in arguments], is_coded=False
        )
