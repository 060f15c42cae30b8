"""How long messages that were recorded would take."""

from __future__ import annotations

Sizes = list[tuple[int, int]]
"""[(the other rank, bytes)]."""


class Simulation:
    """Ranks whose every message takes 1, and where all else is free. A rank sends one message at a
    time, and each begins when its receiver has asked for it; any number may arrive at once.

    Each start of a rank waits for all of the one before it.
    """

    def __init__(self, ranks: list[list[tuple[Sizes, Sizes]]]) -> None:
        self.todo = [list(starts) for starts in ranks]
        self.clock, self.out = ([0] * len(ranks) for _ in range(2))
        self.begun = [False] * len(ranks)
        self.ready: list[tuple[int, int, int]] = []
        self.arrived: dict[tuple[int, int], list[int]] = {}

    def run(self) -> int:
        """The time at which the last rank is done."""
        while any(self.todo):
            if not any(self.advance(rank) for rank in range(len(self.todo))):
                asked_for = [each for each in self.ready if self.is_asked_for(*each[1:])]
                self.send(min(asked_for, key=self.begins))
        return max(self.clock)

    def is_asked_for(self, sender: int, receiver: int) -> bool:
        return self.begun[receiver] and any(
            other == sender for other, _ in self.todo[receiver][0][1]
        )

    def send(self, message: tuple[int, int, int]) -> None:
        _, sender, receiver = message
        ends = self.begins(message) + 1
        self.ready.remove(message)
        self.out[sender] = ends
        self.arrived.setdefault((sender, receiver), []).append(ends)

    def begins(self, message: tuple[int, int, int]) -> int:
        time, sender, receiver = message
        return max(time, self.out[sender], self.clock[receiver])

    def advance(self, rank: int) -> bool:
        """Begin or finish what this rank is at, if that can be."""
        if not self.todo[rank]:
            return False
        send, receive = self.todo[rank][0]
        if not self.begun[rank]:
            self.ready += [(self.clock[rank], rank, other) for other, _ in send]
            self.begun[rank] = True
            return True
        waiting = any(sender == rank for _, sender, _ in self.ready)
        if waiting or not all(self.arrived.get((other, rank)) for other, _ in receive):
            return False
        ends = [self.arrived[other, rank].pop(0) for other, _ in receive] + (
            [self.out[rank]] if send else []
        )
        self.clock[rank] = max([self.clock[rank], *ends])
        self.begun[rank] = False
        del self.todo[rank][0]
        return True
